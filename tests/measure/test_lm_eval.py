"""pronk inside lm-evaluation-harness: a local task, and the harness's own Hugging Face model beside it.

The harness is no part of the extra `test`: what it brings along (datasets, pyarrow, pandas, scipy, scikit-learn, nltk)
is half a gigabyte and a minute of installing, for one file of tests. Without it they skip, and say so.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_folder import save_tiny_chat_model

from pronk.errors import BadRequest, PronkError
from pronk.measure import lm_eval as module
from pronk.measure.lm_eval import register, sampling_of

needs_harness = pytest.mark.usefixtures("harness")


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:  # read when datasets is imported
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        yield pytest.importorskip("lm_eval", reason="lm-evaluation-harness is missing: pip install 'pronk[eval]'")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=256))


@pytest.fixture(scope="module")
def ours(harness: Any, folder: str) -> Any:
    return register()(pretrained=folder, engine="cpu", threads=1)


def asked(*arguments: tuple[Any, ...]) -> list[SimpleNamespace]:
    return [SimpleNamespace(args=each) for each in arguments]


PAIRS = asked(
    ("The capital of France is", " Paris"),
    ("The capital of France is", " a city called Lyon"),
    ("The capital of France is ", "Paris"),  # the space goes over to the continuation
    ("", "no context at all"),
    ("A long one. " * 30, " It loses its beginning."),  # 360 tokens and more into a context of 256
)
TEXTS = asked(("A text as a whole.",), ("Another, longer than the context of the model. " * 20,))


@needs_harness
def test_likelihoods_are_those_of_a_direct_computation(ours: Any) -> None:
    llm = ours.llm
    found = ours.loglikelihood(PAIRS, disable_tqdm=True)
    for request, (likelihood, greedy) in zip(PAIRS, found, strict=True):
        context, continuation = request.args
        ids = llm.tokenizer.encode(context + continuation) if context else [1, *llm.tokenizer.encode(continuation)]
        new = len(llm.tokenizer.encode(continuation)) + context.endswith(" ")
        ids = ids[-257:]
        logits = llm.logits(ids[:-1])[-new:].astype(float)
        chosen = [row[token] for row, token in zip(logits, ids[-new:], strict=True)]
        expected = sum(chosen) - sum(_log_sum_exp(row) for row in logits)
        assert likelihood == pytest.approx(expected, rel=1e-9)
        assert greedy == (logits.argmax(-1).tolist() == ids[-new:])


def _log_sum_exp(row: Any) -> float:
    import numpy as np

    return float(np.log(np.exp(row).sum()))


@pytest.fixture(scope="module")
def theirs(harness: Any, folder: str) -> Any:
    pytest.importorskip("accelerate", reason="lm_eval's Hugging Face model needs accelerate")
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=2, max_length=256)


@needs_harness
@pytest.mark.filterwarnings("ignore")
def test_as_the_harnesss_hugging_face_model(ours: Any, theirs: Any) -> None:
    for request, mine, peers in zip(
        PAIRS, ours.loglikelihood(PAIRS, disable_tqdm=True), theirs.loglikelihood(PAIRS, disable_tqdm=True), strict=True
    ):
        assert mine[0] == pytest.approx(peers[0], rel=1e-4), request
        assert mine[1] == peers[1]
    rolled = theirs.loglikelihood_rolling(TEXTS, disable_tqdm=True)
    assert ours.loglikelihood_rolling(TEXTS, disable_tqdm=True) == pytest.approx(rolled, rel=1e-4)
    assert (ours.prefix_token_id, ours.eot_token_id) == (theirs.prefix_token_id, theirs.eot_token_id)
    until = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False, "temperature": 0.7}
    requests = asked(("Once upon a time", until), ("The end", until), ("x" * 300, until))
    assert ours.generate_until(requests, disable_tqdm=True) == theirs.generate_until(requests, disable_tqdm=True)


@needs_harness
def test_a_prompt_that_is_cut_is_told(ours: Any, caplog: pytest.LogCaptureFixture) -> None:
    ours.loglikelihood(PAIRS, disable_tqdm=True)
    ours.generate_until(asked(("x" * 300, {"until": [], "max_gen_toks": 12})), disable_tqdm=True)
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "1 of 5 prompts did not fit and lost their beginning, 127 tokens at most",
        "1 of 1 prompts did not fit and lost their beginning, 56 tokens at most",
    ]


@needs_harness
def test_sampling_follows_the_harnesss_seed(ours: Any) -> None:
    import numpy as np

    drawn = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0, "top_p": 0.9}
    texts = []
    for seed in (1, 1, 2):
        np.random.seed(seed)
        texts.append(ours.generate_until(asked(("Once", drawn), ("Once", drawn)), disable_tqdm=True))
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][1]


@needs_harness
def test_chats_are_written_by_the_models_template(ours: Any) -> None:
    history = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(history) == "<s>user:hi</s><s>assistant:"
    begun = [*history, {"role": "assistant", "content": "Well,"}]
    assert ours.apply_chat_template(begun, add_generation_prompt=False) == "<s>user:hi</s><s>assistant:Well,"
    assert "add_generation_prompt" in ours.chat_template(True)
    assert ours.chat_template(False) is None


def local_task(folder: Path) -> None:
    """Twelve questions with two answers each, in a file; no network."""
    rows = [{"question": f"What is {n} and {n}?", "choices": [f"{2 * n}", f"{n}"], "answer": n % 2} for n in range(12)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sums.yaml").write_text(f"""\
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "sums.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}} It is"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
""")


@needs_harness
@pytest.mark.filterwarnings("ignore")
def test_the_harnesss_command_line_runs_a_local_task(
    folder: str, tmp_path: Path, ours: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    local_task(tmp_path)
    command = ["pronk", "--model", "pronk", "--batch_size", "8", "--device", "cuda:7"]  # of no concern to pronk
    command += ["--model_args", f"pretrained={folder},engine=cpu,threads=1,quantize=f32", "--tasks", "sums"]
    command += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples"]
    monkeypatch.setattr(sys, "argv", command)
    module.main()
    assert re.search(r"\|sums *\|", capsys.readouterr().out)
    (results,) = (tmp_path / "out").rglob("results_*.json")
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    accuracy = json.loads(results.read_text())["results"]["sums"]["acc,none"]
    right = 0
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        document, likelihoods = sample["doc"], [float(r[0][0]) for r in sample["resps"]]
        pairs = asked(*((f"{document['question']} It is", f" {choice}") for choice in document["choices"]))
        assert likelihoods == pytest.approx([score for score, _ in ours.loglikelihood(pairs, disable_tqdm=True)])
        right += likelihoods.index(max(likelihoods)) == document["answer"]
    assert accuracy == pytest.approx(right / 12)


@needs_harness
def test_an_option_that_there_is_not(folder: str) -> None:
    with pytest.raises(BadRequest, match="model_args has 'quantise'"):
        register()(pretrained=folder, quantise="int8")


def test_what_a_task_may_ask_of_decoding() -> None:
    greedy = {"until": ["\n", ""], "max_gen_toks": 5, "do_sample": False, "temperature": 0.0, "top_p": 0.5}
    assert sampling_of(greedy) == {"max_new_tokens": 5, "stop": ("\n",)}
    drawn = {"until": [], "max_gen_toks": 5, "do_sample": True, "temperature": 0.5, "top_k": 4, "num_beams": 1}
    assert sampling_of(drawn) == {"max_new_tokens": 5, "stop": (), "temperature": 0.5, "top_k": 4, "num_beams": 1}
    with pytest.raises(BadRequest, match="generation_kwargs has 'typical_p'"):
        sampling_of({**greedy, "typical_p": 0.2})


def test_without_the_harness_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    monkeypatch.setattr(module, "register", register.__wrapped__)  # as if it had not been called before
    with pytest.raises(PronkError, match=r"pip install 'pronk\[eval\]'"):
        module.register()
    with pytest.raises(SystemExit, match=r"^pronk: lm-evaluation-harness is not installed"):
        module.main()
