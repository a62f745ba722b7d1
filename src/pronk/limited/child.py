"""The program of a LimitedProcess: it limits itself, then answers lines with what the work's `answer` makes of them.

process.py starts this file. The work is a file of its own, which imports nothing of pronk: to start it is to import
the one library that it needs.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from io import BufferedReader, BufferedWriter

if sys.platform == "win32":
    import ctypes
    from ctypes import wintypes

    class _JobLimits(ctypes.Structure):  # JOBOBJECT_EXTENDED_LIMIT_INFORMATION
        _fields_ = [
            ("process_time", ctypes.c_longlong), ("job_time", ctypes.c_longlong), ("flags", wintypes.DWORD),
            ("least_set", ctypes.c_size_t), ("most_set", ctypes.c_size_t), ("processes", wintypes.DWORD),
            ("affinity", ctypes.c_size_t), ("priority", wintypes.DWORD), ("scheduling", wintypes.DWORD),
            ("io", ctypes.c_ulonglong * 6), ("memory", ctypes.c_size_t), ("job_memory", ctypes.c_size_t),
            ("peak", ctypes.c_size_t), ("job_peak", ctypes.c_size_t),
        ]  # fmt: skip

    class _Limits:
        """A job object: what passes its memory fails, and over its time the process ends."""

        def __init__(self, seconds: float, memory: int) -> None:
            self.seconds, self.limits = seconds, _JobLimits(flags=0x102, memory=memory)  # of a process: time, memory
            self.kernel = ctypes.WinDLL("kernel32", use_last_error=True)
            self.kernel.CreateJobObjectW.restype = wintypes.HANDLE
            self.job = wintypes.HANDLE(self.kernel.CreateJobObjectW(None, None))
            self._set(1e6)
            if not self.kernel.AssignProcessToJobObject(self.job, wintypes.HANDLE(-1)):
                raise ctypes.WinError(ctypes.get_last_error())

        def _set(self, seconds: float) -> None:
            self.limits.process_time = int((os.times().user + seconds) * 1e7)
            size = ctypes.sizeof(self.limits)
            if not self.kernel.SetInformationJobObject(self.job, 9, ctypes.byref(self.limits), size):
                raise ctypes.WinError(ctypes.get_last_error())

        def __enter__(self) -> None:
            self._set(self.seconds)

        def __exit__(self, *_: object) -> None:
            self._set(1e6)

else:
    import resource

    class _Limits:
        """What passes its memory fails, and over its time (the processor's) SIGPROF ends the process."""

        def __init__(self, seconds: float, memory: int) -> None:
            self.seconds = seconds
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            if sys.platform != "darwin":  # which counts what it never uses; renderer.py watches there
                most = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
                resource.setrlimit(resource.RLIMIT_AS, (most, hard))

        def __enter__(self) -> None:
            signal.setitimer(signal.ITIMER_PROF, self.seconds)

        def __exit__(self, *_: object) -> None:
            signal.setitimer(signal.ITIMER_PROF, 0)


def _pipes() -> tuple[BufferedReader, BufferedWriter]:
    """Where requests come from and answers go, known to nobody else: what work prints or reads, in Python, in a library
    or in a program that it starts, is nothing."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(nothing, standard)
    os.close(nothing)
    return requests, answers


def _serve(seconds: float, memory: int, what: str, work: str) -> None:
    """Until the caller closes the pipe."""
    requests, answers = _pipes()
    answer = runpy.run_path(work)["answer"]
    short = json.dumps({"broken": f"{what} takes more than {memory >> 20} MB", "spent": True}).encode() + b"\n"
    limits, own = _Limits(seconds, memory), os.getpid()
    answers.write(b"ready\n")
    answers.flush()
    while line := requests.readline():
        with limits:
            try:
                answered = answer(line)
            except MemoryError:
                answered = short
        if os.getpid() != own:  # work forked, and its child came back here: two would answer one request
            os._exit(1)
        answers.write(answered)
        answers.flush()
        line = answered = b""  # nothing is held while waiting


if __name__ == "__main__":
    sys.path += sys.argv[5:]  # the caller's: this process is started without any
    _serve(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
