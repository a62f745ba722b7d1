"""Tables of time and memory: rates beside other engines, starts, passes of a few tokens, servers."""

from __future__ import annotations

from typing import Any

import harness
from quality_tables import divergences, ratio

NAMES = {
    "smollm2-135m": "SmolLM2-135M",
    "random-1.1b": "1.1B",
    "ctranslate2": "CTranslate2",
    "openvino": "OpenVINO GenAI",
}
HEADLINE = (
    ("smollm2-135m", "q4", "prefill", "135M, Q4_0: prefill 512"),
    ("smollm2-135m", "q4", "decode", "135M, Q4_0: decode 128"),
    ("smollm2-135m", "q8", "decode", "135M, Q8_0: decode 128"),
    ("random-1.1b", "q4", "prefill", "1.1B, Q4_0: prefill 512"),
    ("random-1.1b", "q4", "decode", "1.1B, Q4_0: decode 128"),
    ("random-1.1b", "bf16", "decode", "1.1B, BF16: decode 128"),
)


def vs_transformers(results: dict[str, Any]) -> str:
    lengths = {"prefill": results["settings"]["prefill_tokens"], "decode": 128}
    rows = []
    for dtype, measured in results["measured"].items():
        for task, length in lengths.items():
            rates, peer = measured[task]["tok_s"], measured[task]["peer"]
            cells = (rate(rates["pronk"]), rate(rates[peer]), ratio(measured[task]["ratio"]))
            rows.append([f"{task} {length}, {dtype}", *cells])
    peaks = [measured["peak_rss_mb"] for measured in results["measured"].values()]
    memory = (" / ".join(f"{peak[side]:.0f}" for peak in peaks) + " MB" for side in ("pronk", "transformers"))
    rows.append([f"peak memory, {' / '.join(results['measured'])}", *memory, ""])
    return harness.table(("tokens/s (medians)", "pronk", "transformers", "ratio, the median of each round's"), rows)


def vs_llama_cpp(results: dict[str, Any]) -> str:
    sizes = results["settings"]["sizes"]
    rows = []
    for model, formats in results["measured"].items():
        for name, measured in formats.items():
            for task, taken in measured["tasks"].items():
                what = f"{NAMES[model]}, {name} vs {measured['theirs']}, {_task(task, sizes)}"
                read = taken.get("read", {})
                shares = " / ".join(f"{read[side]['share_of_ceiling']:.0%}" for side in ("pronk", "llama.cpp") if read)
                rows.append([what, *_beside(taken, "llama.cpp"), shares])
    header = ("tokens/s (medians)", "pronk", "llama.cpp", "ratio", "goal", "peak memory, MB", "of the read ceiling")
    return harness.table(header, rows)


def headline(results: dict[str, Any]) -> str:
    """What README shows of vs_llama_cpp."""
    rows = []
    for model, name, task, said in HEADLINE:
        measured = results["measured"][model][name]
        rates = measured["tasks"][task]["tok_s"]
        cells = (rate(rates["pronk"]), rate(rates["llama.cpp"]), ratio(measured["tasks"][task]["ratio"]))
        rows.append([said, *cells])
    return harness.table(("tokens a second", "pronk", "llama.cpp", "ratio"), rows)


def vs_ctranslate2(results: dict[str, Any]) -> str:
    sizes = results["settings"]["sizes"]
    rows = [
        [f"int8 vs {NAMES[peer]}, {_task(task, sizes)}", *_beside(taken, peer)]
        for peer, measured in results["measured"].items()
        for task, taken in measured["tasks"].items()
    ]
    return harness.table(("tokens/s (medians)", "pronk", "peer", "ratio", "goal", "peak memory, MB"), rows)


def vs_bitsandbytes(results: dict[str, Any]) -> str:
    """Speed and memory, and then the quality that they come with."""
    sizes = results["settings"]["sizes"]
    rows = [
        [f"llm-int8 vs load_in_8bit in {dtype}, {_task(task, sizes)}", *_beside(taken, "bitsandbytes")]
        for dtype, measured in results["measured"].items()
        for task, taken in measured["tasks"].items()
    ]
    header = ("tokens/s (medians)", "pronk", "bitsandbytes", "ratio", "goal", "peak memory, MB")
    return harness.table(header, rows) + "\n\n" + divergences(results["quality"])


def vs_peft(results: dict[str, Any]) -> str:
    """Speed and memory, and how far apart the losses are that they come with."""
    rows = []
    for case, measured in results["measured"].items():
        rates, memory, apart = measured["tok_s"], measured["peak_rss_mb"], measured["loss_difference"]
        less = f"{memory['pronk'] / memory['PEFT'] - 1:+.0%}"
        cells = (rate(rates["pronk"]), rate(rates["PEFT"]), ratio(measured["ratio"]))
        rows.append([case, *cells, f"{memory['pronk']:.0f} / {memory['PEFT']:.0f}", less, f"{apart['mean']:.1g}"])
    header = ("tokens/s (medians)", "pronk", "PEFT", "ratio", "peak memory, MB", "", "mean losses apart by")
    return harness.table(header, rows)


def start(results: dict[str, Any]) -> str:
    """Processes from their beginning, and what they hold."""
    goals, imported = results["goals"], results["import_ms"]["pronk"]
    rows = [["`import pronk`", _seconds(imported, 1e-3), f"{goals['import_ms'] / 1e3:g}", "", "", ""]]
    for dtype, measured in results["measured"].items():
        memory = measured["memory_mb"]
        beside = memory["peak"] - memory["weights"] - memory["kv"]
        cells = [_seconds(measured["first_token_s"]), f"{goals['first_token_s']:g}"]
        cells += [f"{memory['peak']:.0f}", f"{beside:.0f}", f"{goals['beside_mb']}"]
        rows.append([f"`pronk generate -n 1 --quantize {dtype}`", *cells])
    return harness.table(("", "seconds", "goal", "peak memory, MB", "beside weights and KV", "goal"), rows)


def pack_cache(results: dict[str, Any]) -> str:
    """A large model's start, packed each time and once; what two processes hold; what a token takes after either."""
    rows = []
    for dtype, measured in results["measured"].items():
        starts, two = measured["first_token_s"], measured["two_processes_mb"]
        cells = [_seconds(starts["anew"]), f"{measured['first_start_s']:.2f}", _seconds(starts["kept"])]
        cells += [f"{results['goals']['first_token_s']:g}", f"{two['anew']:.0f}, {two['kept']:.0f}"]
        rows.append([f"{dtype}, {measured['packed_mb']:.0f} MB packed", *cells, ratio(measured["decode_ratio"])])
    header = (
        "seconds to the first token", "packed anew", "packed into a file", "out of the file", "goal",
        "two processes, MB: anew, kept", "time of a token, kept to anew",
    )  # fmt: skip
    return harness.table(header, rows)


def few_tokens(results: dict[str, Any]) -> str:
    """A pass of several tokens as a multiple of a pass of one; in brackets what its limit is of its time."""
    measured = results["measured"]
    counts = list(next(iter(next(iter(measured.values())).values()))["ratios"])
    rows = [
        [
            f"{one['machine']['isa'] if isa == 'best' else isa}, {name}",
            f"{one['one_ms']['median']:.1f} ms ({one['of_limit']['1']['median']:.0%})",
            *(f"{one['ratios'][n]['median']:.2f} ({one['of_limit'][n]['median']:.0%})" for n in counts),
        ]
        for isa, formats in measured.items()
        for name, one in formats.items()
    ]
    return harness.table(("1.1B behind 512 tokens", "one token", *counts), rows)


def llama2_7b(results: dict[str, Any]) -> str:
    """A model of Llama-2-7B's shape: what loading takes, and rates of as many texts at once as stand in the head."""
    batches = [str(count) for count in results["settings"]["batches"]]

    def rates(found: dict[str, Any], what: str) -> str:
        return " / ".join(f"{found[count][what]['median']:.3g}" for count in batches if count in found)

    rows = [
        [
            f"pronk, {name}" if side == "pronk" else f"{side}, Q4_0",
            f"{found['load_s']:.1f}",
            f"{found['memory_mb']['peak'] / 1e3:.1f}",
            rates(found["cached"], "prefill"),
            rates(found["cached"], "decode"),
            rates(found["uncached"], "decode"),
        ]
        for name, measured in results["measured"].items()
        for side, found in measured["sides"].items()
    ]
    every = [found for measured in results["measured"].values() for found in measured["sides"].values()]
    prompt, new = results["settings"]["prompt"], results["settings"]["new"]
    counts = " / ".join(batches)
    header = (
        "tokens/s",
        "load, s",
        "peak memory, GB",
        f"prefill {prompt}, {counts} at once",
        f"decode {new}, {counts}",
    )
    uncached = " / ".join(batch for batch in batches if any(batch in found["uncached"] for found in every))
    return harness.table((*header, f"decode without a cache, {uncached}"), rows)


def serve(results: dict[str, Any]) -> str:
    """Rates of many streams, beside what the same session gives without HTTP and what llama.cpp's loop gives."""
    rows = []
    for name, measured in results["measured"].items():
        for label, case in measured["cases"].items():
            beside = ratio(case["of_llama_cpp"]) if "of_llama_cpp" in case else ""
            cells = (rate(case["total_tok_s"]["http"]), ratio(case["http_of_session"]), beside)
            rows.append([f"{name}, {label} at once", *cells, *_waits(case["streams"])])
    return harness.table(("", "tokens/s, read and written", "of the Session", "of llama.cpp", *_WAITS), rows)


def vs_servers(results: dict[str, Any]) -> str:
    """One text, and several at once, from each server."""
    rows = [
        [f"{at_once} at once, {name}", rate(found["total_tok_s"]), ratio(found["times_of_theirs"]), *_waits(found)]
        for at_once, servers in results["measured"].items()
        for name, found in servers.items()
    ]
    first = next(iter(next(iter(results["measured"].values()))))
    return harness.table(("", "tokens/s, read and written", f"{first} is as fast times", *_WAITS), rows)


def _beside(taken: dict[str, Any], peer: str) -> list[str]:
    rates, memory = taken["tok_s"], taken["peak_rss_mb"]
    goal = f"{taken['goal']:g}" if taken["goal"] else ""
    cells = [rate(rates["pronk"]), rate(rates[peer]), ratio(taken["ratio"]), goal]
    return [*cells, f"{memory['pronk']:.0f} / {memory[peer]:.0f}"]


_WAITS = ("first token, ms: p50 / p99", "each later one, ms: p50 / p99")


def _waits(found: dict[str, Any]) -> list[str]:
    """`per_token_s`, for servers send tokens together, and between those there is nothing."""
    return [" / ".join(_ms(found[what][p]) for p in ("p50", "p99")) for what in ("first_s", "per_token_s")]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def _task(task: str, sizes: dict[str, int]) -> str:
    return {
        "prefill": f"prefill {sizes['prefill']}",
        "long": f"prefill {sizes['long']}",
        "decode": f"decode {sizes['new']}",
        "batch": f"decode {sizes['new']}, {sizes['sequences']} at once",
    }[task]


def rate(values: dict[str, float]) -> str:
    median = values["median"]
    return f"{median:.0f}" if median >= 100 else f"{median:.1f}"


def _seconds(values: dict[str, float], unit: float = 1) -> str:
    median, least, most = (values[key] * unit for key in ("median", "min", "max"))
    return f"{median:.2g} ({least:.2g} to {most:.2g})"
