"""Loads the libraries of a run, each at the moment when it costs least.

What the first step needs is loaded in one thread, one library after the other: threads that import
at the same time take the interpreter from each other and are slower together than one alone. Two
things run in threads beside it, because they do not need the interpreter: the driver creates the
card's context, and then Triton hashes its own files. What only the report needs is loaded in a
process of its own (`report_process`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from multiprocessing.process import BaseProcess

_FIRST = ("transformers.trainer", "memfit.training.trainer")

_LEFT_OUT = ("peft", "scipy.optimize", "scipy.stats", "sklearn.metrics")
"""transformers asks whether a model is peft's, and imports functions of the others for object
detection, GLUE and assisted generation."""

_USUAL = gc.get_threshold()

_RARELY = (100_000, 10, 10)


_COMPILER = "torch._dynamo"

_WITHOUT_IT = (f"{_COMPILER}._trace_wrapped_higher_order_op", f"{_COMPILER}.config")
"""Modules of the compiler that masks and fake tensors need, and that do not need the rest of it."""

_SOURCES = f"{_COMPILER}.source"

_MARKS = ("allow_in_graph", "assume_constant_result", "disable", "graph_break")


class _Process:
    own = False


_process = _Process()


def own_process() -> None:
    """Says that this process is memfit's alone, and may load libraries as suits memfit best.

    The garbage collector looks less often: imports create no garbage, and take a tenth less. A
    training collects as usual: a cycle may hold the card's memory.
    """
    _process.own = True
    gc.set_threshold(*_RARELY)


_MOST_PROCESSES = 4
"""Each may have to load torch for itself: about half a gigabyte."""


def processes_to_use() -> int:
    """How many processes may share work: one, unless this is memfit's own, which others follow."""
    return min(os.cpu_count() or 1, _MOST_PROCESSES) if _process.own else 1


@contextlib.contextmanager
def other_processes(count: int) -> Iterator[list[Executor]]:
    """Yields so many processes to plan in, and ends them when the block is left.

    On Linux each is forked from this one at its first task, and begins with all that is loaded and
    known by then: loading takes as long as half a plan. With a card, torch runs backward in
    threads, which do not survive a fork; there, and on other systems, each process starts at once
    and loads what planning needs for itself.

    Inside, torch computes in one thread: others would take a core from the other processes, even
    while they wait for work.
    """
    if not count:
        yield []
        return
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import active_children, get_context

    import torch

    from memfit.memory.device import best_device

    forks = _process.own and sys.platform == "linux" and best_device().type == "cpu"
    context = get_context("fork" if forks else "spawn")
    before, threads = active_children(), torch.get_num_threads()
    others = [
        ProcessPoolExecutor(1, mp_context=context, initializer=_begin_beside) for _ in range(count)
    ]
    torch.set_num_threads(1)
    try:
        if not forks:
            start_processes(others)
        yield list(others)
    finally:
        torch.set_num_threads(threads)
        started = [one for one in active_children() if one not in before]
        for process in others:
            process.shutdown(wait=False, cancel_futures=True)
        for child in started:  # or this process would wait for what it does
            child.terminate()


def start_processes(processes: Iterable[Executor]) -> None:
    """Starts those of `other_processes` that do not run yet.

    Call it while no other thread computes: a fork copies locks that such a thread holds.
    """
    from concurrent.futures import BrokenExecutor

    for process in processes:
        with contextlib.suppress(BrokenExecutor, OSError):  # whoever sends it a task is told
            process.submit(load_to_plan)


def _begin_beside() -> None:
    """Prepares a process of `other_processes`; it ends when the process that started it dies."""
    import signal
    from multiprocessing import parent_process

    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the other one, which ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    own_process()
    gc.enable()  # planning switches collection off, and a fork inherits that
    torch.set_num_threads(1)
    started_by = parent_process()
    assert started_by is not None
    threading.Thread(target=_end_with, args=(started_by,), daemon=True).start()


def _end_with(other: BaseProcess) -> None:
    other.join()
    os._exit(1)


def load_to_plan() -> None:
    """Loads what planning needs; in memfit's own process without what transformers never calls."""
    load_to_answer()  # a trace is not compiled either, and ranks are imitated
    # torch itself would import it at the first operator on a fake tensor, inside a trace.
    importlib.import_module("torch.distributed.tensor")
    with left_out() if _process.own else contextlib.nullcontext():
        importlib.import_module("memfit.planner.pricing.pricer")


def load_to_answer() -> None:
    """Loads transformers without the parts that only training, compiling and clusters need.

    Importing `transformers.modeling_utils` also imports torch's compiler, distributed tensors and
    scipy.optimize (for a loss of object detection): a third of the time until one sentence has its
    answer. Does nothing unless the process is memfit's own, since others may need them later.
    """
    if not _process.own or "transformers" in sys.modules:
        return
    import torch

    spec = importlib.util.find_spec(_COMPILER)
    if _COMPILER not in sys.modules and spec is not None:
        sys.modules[_COMPILER] = _LazyCompiler(spec)
        sys.meta_path.insert(0, _CompilerModules())
    available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False  # transformers asks once and remembers
    try:
        with left_out():
            _load_transformers()
            importlib.import_module("transformers.modeling_utils")
    finally:
        torch.distributed.is_available = available


class _LazyCompiler(ModuleType):
    """Stands in for `torch._dynamo` until something is compiled.

    transformers marks functions for the compiler where it defines them, and torch does so when it
    fills weights. A mark needs no compiler; every other name loads the real package.
    """

    def __init__(self, spec: importlib.machinery.ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__ = spec
        self.__path__ = spec.submodule_search_locations or []
        sys.modules[_SOURCES] = self.source = _Sources(_SOURCES)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _unmarked if name in _MARKS else getattr(_load_compiler(), name)


class _Sources(ModuleType):
    """Stands in for the names a compiler gives to tensors: fake tensors ask for some, unused."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Source


class _Source:
    def __init__(self, *_: Any) -> None:
        self.name = ""


class _CompilerModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Has every module of `torch._dynamo` load the real package first, but for `_WITHOUT_IT`."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        """None for every name that is not the compiler's."""
        if fullname.rpartition(".")[0] != _COMPILER or fullname in _WITHOUT_IT:
            return None
        _load_compiler()
        return importlib.util.spec_from_loader(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Returns the module that the package has loaded by now."""
        module = importlib.import_module(spec.name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module has run already; only its own spec is put back."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


def _load_compiler() -> ModuleType:
    if isinstance(sys.modules[_COMPILER], _LazyCompiler):
        del sys.modules[_COMPILER], sys.modules[_SOURCES]
        sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, _CompilerModules)]
    return importlib.import_module(_COMPILER)


def _unmarked(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    return (lambda later: later) if function is None else function


def load_libraries(*, card: bool = True) -> None:
    """Loads what the first step needs. Without `card` no CUDA context is created."""
    from memfit.memory.device import has_cuda

    # Of several cards, the Trainer decides which is this process's.
    starts = card and "LOCAL_RANK" not in os.environ and has_cuda()
    context = threading.Thread(target=_create_context)
    if starts:
        context.start()
    with left_out():
        _load_transformers()
        for name in _FIRST:
            importlib.import_module(name)
    if starts:
        context.join()
        threading.Thread(target=_read_triton, daemon=True).start()
    gc.set_threshold(*_USUAL)


def _load_transformers() -> None:
    """Imports transformers with its list of models, for which it reads 2,500 files, once.

    It makes the list for itself and again for `transformers.models`; the cache that should prevent
    this holds 128 folders, and there are 450 of them.
    """
    import transformers
    from transformers.utils import import_utils

    listing: Any = import_utils
    make = listing.define_import_structure
    # This call is answered from the cache.
    whole = make(Path(transformers.__file__).parent / "models", prefix="models")
    models = {
        needed: {name.removeprefix("models."): found for name, found in modules.items()}
        for needed, all_modules in whole.items()
        if (modules := {k: v for k, v in all_modules.items() if k.startswith("models.")})
    }
    listing.define_import_structure = lambda _: models
    try:
        importlib.import_module("transformers.models")
    finally:
        listing.define_import_structure = make


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Modules imported inside take functions and classes of large libraries without loading these.

    Whoever calls such a function loads its library then.
    """
    put = {name: _Promise(name) for name in _LEFT_OUT if name not in sys.modules}
    if "peft" in put and put["peft"].__spec__ is None:
        del put["peft"]  # it is not installed
    sys.modules.update(put)
    try:
        yield
    finally:
        for name in put:
            del sys.modules[name]


class _Promise(ModuleType):
    """Stands in sys.modules for a library that is not loaded yet."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        if "." not in name:  # whether it is installed is asked of its spec
            self.__spec__ = importlib.util.find_spec(name)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return _PromisedClass(name, (), {"__module__": self.__name__})

        def call(*args: Any, **named: Any) -> Any:
            return getattr(importlib.import_module(self.__name__), name)(*args, **named)

        return call


class _PromisedClass(type):
    """Stands for a class of a library that is not loaded yet: until then nothing is of its kind."""

    def __instancecheck__(cls, thing: Any) -> bool:
        library = sys.modules.get(cls.__module__)
        if library is None or isinstance(library, _Promise):
            return False
        return isinstance(thing, getattr(library, cls.__name__))


def _read_triton() -> None:
    """Has Triton hash its own files, as it does for its first kernel: 0.4 s.

    hashlib lets other threads run meanwhile. Triton remembers the answer.
    """
    with contextlib.suppress(Exception):  # not installed, or a version that does it elsewhere
        importlib.import_module("triton.runtime.cache").triton_key()


def _create_context() -> None:
    from memfit.memory.device import context_bytes

    with contextlib.suppress(Exception):  # whoever uses the card next meets the same error
        # Asking torch for the current device would create the context before it is measured.
        context_bytes(0)
