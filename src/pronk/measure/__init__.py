"""pronk.measure: what models are measured by. docs/measuring.md shows these at work, and what their JSON holds.

perplexity.perplexity        of a text, with its error; `beside`: of two models, paired by windows
perplexity.surprises         what it is made of, token by token
divergence.divergence        how far one model's predictions lie from another's
divergence.compared          what it is made of, token by token
divergence.noise_floor       how far a model lies from itself when only its rounding changes
noise.paired, over_windows   means over windows and their standard errors
windows.windows              how a text is cut; `evaluation_text`: the one that comes with pronk
machine.provenance           the machine, versions and digests that figures come from
"""
