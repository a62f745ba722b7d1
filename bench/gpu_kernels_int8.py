"""Products in 8 bits by our kernels, beside torch's in bfloat16, at the shapes of Llama 3 8B: to choose constants by.

Each time is of a CUDA graph that calls one after the other with copies of the weights which no cache holds together:
the median of its replays. python bench/gpu_kernels_int8.py
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.formats.int8 import Outliers
from pronk.torch_engine.gpu import activation_codes as codes
from pronk.torch_engine.gpu.int8_few import FewTile, RowTile, few_product, row_product
from pronk.torch_engine.gpu.int8_many import Tile, many_product
from pronk.torch_engine.gpu.int8_some import SomeTile, some_product

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
TOKENS = (1, 16, 64, 512, 2048)
RULES = {"least 6": Outliers(6.0, 6), "least 0": Outliers(6.0, 0), "none": None}
COLD = 200_000_000  # bytes of all copies
REPLAYS = 7

Call = Callable[[int], object]  # with the weights of this number

ROW_TILES = (RowTile(8, 2048, 4), RowTile(4, 2048, 4), RowTile(4, 4096, 8), RowTile(8, 1024, 2))
FEW_TILES = (FewTile(16, 256, 4, 4, 4), FewTile(16, 512, 4, 4, 3), FewTile(32, 256, 4, 4, 3), FewTile(32, 256, 1, 4, 4))
SOME_TILES = (SomeTile(32, 128, 4, 4), SomeTile(64, 128, 4, 4), SomeTile(64, 256, 4, 3))
SMALL_TILES = (Tile(64, 64, 128, 4, 4), Tile(64, 128, 128, 4, 3), Tile(64, 32, 128, 4, 4))
LARGE_TILES = (Tile(128, 256, 128, 8, 3), Tile(128, 128, 128, 8, 4), Tile(128, 128, 128, 4, 4))


def seconds(call: Call, copies: int) -> float:
    for number in range(min(copies, 2)):
        call(number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(copies):
            call(number)
    graph.replay()
    found = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / copies)
    return statistics.median(found)


def ways(x: Tensor, qs: list[Tensor], scale: Tensor, rule: Outliers | None) -> Iterator[tuple[str, Call]]:
    t, n = len(x), len(qs[0])
    y = x.new_empty(t, n)
    if t == 1:
        h = codes.of_a_row(x, None, rule, False)
        yield "codes alone", lambda _: codes.of_a_row(x, None, rule, False)
        if rule is not None and rule.least == 0:
            return
        for tile in ROW_TILES:
            yield f"{tile}", lambda i, tile=tile: row_product(h, qs[i], scale, None, None, y, False, tile)
        both = codes.of_few(x, None, rule, False)
        for tile in FEW_TILES[:2]:
            yield f"{tile}", lambda i, tile=tile: few_product(*both, qs[i], scale, None, None, y, False, tile)
    elif t <= 16:
        both = codes.of_few(x, None, rule, False)
        yield "codes alone", lambda _: codes.of_few(x, None, rule, False)
        for tile in FEW_TILES:
            yield f"{tile}", lambda i, tile=tile: few_product(*both, qs[i], scale, None, None, y, False, tile)
    else:
        if t <= 64:
            shared = codes.of_some(x, None, rule, False)
            for tile in SOME_TILES:
                yield f"{tile}", lambda i, tile=tile: some_product(*shared, qs[i], scale, None, None, y, tile)
        of_x = codes.of_many(x, rule, False)
        yield "codes alone", lambda _: codes.of_many(x, rule, False)
        given = (x, of_x, rule)
        for tile in SMALL_TILES if t <= 64 else LARGE_TILES:
            yield f"{tile}", lambda i, tile=tile: many_product(*given, qs[i], scale, None, None, y, True, tile)
        yield "cuBLASLt", lambda i: many_product(*given, qs[i], scale, None, None, y, False)


def measure(print: Callable[[str], object] = print, tokens: tuple[int, ...] = TOKENS) -> None:
    card = torch.device("cuda")
    generator = torch.Generator(card).manual_seed(0)
    for name, (n, k) in SHAPES.items():
        copies = max(2, COLD // (n * k))
        qs = [
            torch.randint(-127, 128, (n, k), dtype=torch.int8, device=card, generator=generator) for _ in range(copies)
        ]
        scale = torch.full((n,), 1e-3, device=card)
        floats = [q.to(torch.bfloat16) for q in qs]
        for t in tokens:
            x = torch.randn(t, k, device=card, generator=generator, dtype=torch.bfloat16)
            x[:, :: k // 7] *= 8  # a few columns have most of the outliers over 6
            for rule, way, call in [
                ("", "bfloat16 F.linear", lambda i, x=x, floats=floats: F.linear(x, floats[i])),
                *((rule, way, call) for rule, outliers in RULES.items() for way, call in ways(x, qs, scale, outliers)),
            ]:
                try:
                    took = seconds(call, copies)
                except Exception as error:  # one tile that does not fit is no reason to measure no other
                    print(f"{name:8} T {t:5} {rule:8} {way}: {type(error).__name__}: {str(error).splitlines()[0]}")
                    continue
                size = 2 if way.startswith("bf") else 1
                print(
                    f"{name:8} T {t:5} {rule:8} {way:60} {took * 1e6:8.1f} us"
                    f" {n * k * size / took / 1e9:7.0f} GB/s {2 * t * n * k / took / 1e12:6.0f} TOPS"
                )


if __name__ == "__main__":
    measure()
