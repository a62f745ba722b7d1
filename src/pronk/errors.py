"""What pronk raises: one line that names the thing, what is wrong with it, and the way out."""

from __future__ import annotations

from os import PathLike

from pronk.terminal import shown_in_line

_NO_MEMORY = ("out of memory", "can't allocate memory", "Cannot allocate memory", "bad_alloc")  # torch, Linux, C++


def short(value: object) -> str:
    """`value` as an error message can carry it: one line, printable, not long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def os_problem(error: OSError) -> str:
    """The file, if any, and what the system says of it, without its number."""
    where = f"{error.filename}: " if error.filename is not None else ""
    return where + (error.strerror or str(error) or type(error).__name__)


def out_of_memory(error: BaseException) -> str | None:
    """What an error says where it means that memory ran out, which libraries say in several ways; None of others."""
    said = str(error).strip()
    by_its_words = isinstance(error, RuntimeError | OSError) and any(sign in said for sign in _NO_MEMORY)
    if by_its_words or isinstance(error, MemoryError):
        return one_line(said.partition("\n")[0], 300) or "out of memory"
    return None


def one_line(text: str, most: int) -> str:
    """`text` as a terminal may show it, whoever wrote it: signs for what it would obey, too much of it cut."""
    text = shown_in_line(text)
    return text if len(text) <= most else f"{text[: most * 2 // 3]}…{text[-(most // 3) :]}"


class PronkError(Exception):
    """Any error that is the input's fault rather than pronk's; the command line prints it and exits 1."""

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message.replace("\n", " "), 2000))


class BadFile(PronkError):
    """A file that breaks its own format: truncated, out of range, inconsistent or hostile.

    `field` names the place in the format ("tensor 'a.weight' shape"), `offset` the byte where it stands.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        problem: str,
        *,
        field: str | None = None,
        offset: int | None = None,
        most: int = 600,  # characters of the problem
    ) -> None:
        self.path, self.problem, self.field, self.offset = str(path), problem, field, offset
        where = "".join((f": {field}" if field else "", f" at byte {offset}" if offset is not None else ""))
        what = one_line(problem.replace("\n", " "), most)
        super().__init__(f"{one_line(self.path, 500)}{one_line(where, 200)}: {what}")


class Unsupported(PronkError):
    """A well-formed input that asks for mathematics or an option pronk does not have; the message names it."""


class BadRequest(PronkError, ValueError):
    """An argument out of range, or two that contradict each other."""


class ContextOverflow(PronkError):
    """A prompt that does not fit; never cut unless truncation was asked for.

    `problem` is the message without the ways out, `can_be_cut` whether a cut is one of them.
    """

    def __init__(self, prompt_tokens: int, limit: int, which: str = "the prompt", *, can_be_cut: bool = True) -> None:
        self.prompt_tokens, self.limit, self.can_be_cut = prompt_tokens, limit, can_be_cut
        self.context = limit + can_be_cut  # a prompt that is to be continued leaves room for one token
        self.problem = f"{which} has {prompt_tokens} tokens and at most {limit} fit"
        cut = ", or ask for a cut (truncate='left'; of a chat, overflow='drop-oldest')" if can_be_cut else ""
        super().__init__(f"{self.problem}; shorten it{',' if cut else ' or'} raise ctx_size{cut}")


class NotEnoughMemory(PronkError):
    """More memory is needed than there is; `problem` is the message without the way out."""

    def __init__(self, problem: str, way_out: str) -> None:
        self.problem = problem
        super().__init__(f"{problem}; {way_out}")


class ModelNotFound(PronkError):
    """A model name or path that leads to nothing."""


class DownloadFailed(PronkError):
    """A download that did not end in a verified file: no network, no space, wrong hash, refused."""


class NoTokenizer(PronkError):
    """Text was given to, or asked of, a checkpoint that carries no tokenizer."""
