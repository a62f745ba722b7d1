"""What products of codes reach on this GPU, by shape, rows of x and block sizes: `python bench/gpu_codes_probe.py`."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from pronk.torch_engine.codes import Codes
from pronk.torch_engine.gpu import codes as products
from pronk.torch_engine.gpu.codes import CodesProduct

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROW = [(8, 128), (4, 128), (16, 32), (8, 32)]  # rows, chunks
FEW = [
    (64, 8, 4, 3),
    (64, 8, 4, 2),
    (64, 8, 4, 1),
    (64, 4, 4, 3),
    (128, 8, 8, 2),
    (128, 4, 4, 3),
]  # rows, chunks, warps, stages
CACHE = 100 << 20  # twice the second-level cache


def codes(bits: int, n: int, k: int) -> Codes:
    scale = torch.rand(n, k // 32, device="cuda").half() * 0.01
    if bits == 8:
        return Codes(k, torch.randint(-127, 128, (n, k // 32, 32), dtype=torch.int8, device="cuda"), scale)
    q = torch.randint(0, 256, (n, k // 32, 16), dtype=torch.uint8, device="cuda")
    return Codes(k, q, scale, -7.5 * scale)


def call(name: str, x: torch.Tensor, n: int) -> dict[str, object]:
    """As a block calls it."""
    if name in ("qkv", "gate_up"):
        return {"norm": (torch.ones(x.shape[1], device="cuda", dtype=x.dtype), 1e-5), "gated": name == "gate_up"}
    return {"residual": torch.zeros(len(x), n, device="cuda", dtype=x.dtype)}


def seconds(calls: list[Callable[[], object]], least: float = 0.6e-3, rounds: int = 9) -> float:
    """Of one of them: a graph of all, again and again, its median."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for one in calls[:2]:
            one()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for one in calls:
                one()
        graph.replay()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(), graph.replay(), end.record(), torch.cuda.synchronize()
        times = max(1, round(least * 1e3 / max(1e-3, start.elapsed_time(end))))
        found = []
        for _ in range(rounds):
            start.record()
            for _ in range(times):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(end) / times / len(calls) / 1e3)
    return statistics.median(found)


def copy_speed() -> float:
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() / seconds([lambda: b.copy_(a)])


def choose(row: tuple[int, int] | None, few: tuple[int, int, int, int] | None) -> None:
    if row:
        products._ROW_ROWS, products._ROW_BLOCK = row
    if few:
        products._FEW_ROWS, products._FEW_BLOCK, products._FEW_WARPS, products._FEW_STAGES = few


def compile_one(bits: int, row: int, few: int) -> None:
    """So that the kernels are in Triton's cache."""
    choose(ROW[row] if row >= 0 else None, FEW[few] if few >= 0 else None)
    for name, (n, k) in SHAPES.items():
        product = CodesProduct(codes(bits, n, k), None)
        for t in (1,) if row >= 0 else (4, 64):
            x = torch.zeros(t, k, device="cuda", dtype=torch.bfloat16)
            product(x, **call(name, x, n))  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", type=int, nargs=3)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--bits", type=int, nargs="*", default=[4, 8])
    given = parser.parse_args()
    if given.compile:
        return compile_one(*given.compile)
    began = time.time()
    jobs = [(b, r, -1) for b in given.bits for r in range(len(ROW))] + [
        (b, -1, f) for b in given.bits for f in range(len(FEW))
    ]
    children = [
        (
            job,
            subprocess.Popen(
                [sys.executable, __file__, "--compile", *map(str, job)], stderr=subprocess.PIPE, text=True
            ),
        )
        for job in jobs
    ]
    broken = set()
    for job, child in children:
        _, error = child.communicate()
        if child.returncode:
            broken.add(job)
            print("does not compile or run:", job, (error or "").strip().splitlines()[-1:])
    print(f"compiled in {time.time() - began:.1f} s")
    speed = copy_speed()
    print(f"{torch.cuda.get_device_name()}: a copy moves {speed / 1e9:.0f} GB/s")
    results = []
    for bits in given.bits:
        for name, (n, k) in SHAPES.items():
            nbytes = (bits + (0.5 if bits == 8 else 1.0)) / 8 * n * k
            copies = [CodesProduct(codes(bits, n, k), None) for _ in range(int(CACHE // nbytes) + 1)]
            for t in given.rows:
                x = torch.randn(t, k, device="cuda", dtype=torch.bfloat16)
                how = call(name, x, n)
                for number, config in enumerate(ROW if t == 1 else FEW):
                    if ((bits, number, -1) in broken and t == 1) or ((bits, -1, number) in broken and t > 1):
                        continue
                    choose(*((config, None) if t == 1 else (None, config)))  # type: ignore[arg-type]
                    try:
                        took = seconds([lambda p=p, x=x, how=how: p(x, **how) for p in copies])  # type: ignore[misc]
                    except Exception as error:
                        print(bits, name, t, config, "fails:", str(error).splitlines()[0])
                        continue
                    results.append((bits, name, t, config, took))
                    print(
                        f"q{bits} {name:8} T={t:<3} {config!s:15} {took * 1e6:7.1f} us {nbytes / took / 1e9:6.0f} GB/s "
                        f"{nbytes / took / speed:5.2f} of copy"
                    )
            del copies
    for t in (128, 512, 2048):  # all as floats first
        n, k = SHAPES["gate_up"]
        x = torch.randn(t, k, device="cuda", dtype=torch.bfloat16)
        plain = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        took = seconds([lambda x=x, w=plain: F.linear(x, w)])  # type: ignore[misc]
        print(f"bf16 gate_up T={t}: {took * 1e6:.0f} us, {2 * t * n * k / took / 1e12:.0f} TFLOP/s")
        for bits in given.bits:
            product = CodesProduct(codes(bits, n, k), None)
            for piece in (1 << 23, 1 << 24, 1 << 25, 1 << 27):
                products._PIECE = piece
                products.prepare.cache_clear()
                products.prepare(x.device, x.dtype)
                took = seconds([lambda p=product, x=x: p(x)])  # type: ignore[misc]
                print(f"q{bits} gate_up T={t} pieces of {piece >> 20} M: {took * 1e6:.0f} us")
    print(json.dumps([(*r[:3], list(r[3]), r[4]) for r in results]))
    print(f"in {time.time() - began:.1f} s")


if __name__ == "__main__":
    main()
