"""Inductor's code for an H100 on a machine, and a torch, without CUDA.

In: graphs of fake tensors. Out: the wrapper that Inductor writes for each, the Triton
kernels in it, compiled for sm_90a if asked, and what a call of the wrapper does to
memory: it is run on tensors without data. Nothing is computed, and no kernel launched.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

# How a wrapper defines a kernel: its name, and its text.
_KERNEL = re.compile(
    r"^\w+ = async_compile\.triton\('(\w+)', '''\n(.*?)'''", re.M | re.S
)


# Autograd asks whether there is CUDA, and for a stream of every tensor on it.
_GUARD = """
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
const Device here(DeviceType::CUDA, 0);
struct Guard : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return here; }
  Device getDevice() const override { return here; }
  Stream getStream(Device) const noexcept override {
    return Stream(Stream::DEFAULT, here);
  }
  Stream exchangeStream(Stream) const noexcept override {
    return Stream(Stream::DEFAULT, here);
  }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag)
      const override {}
  void block(void*, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
struct Hooks : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
const at::CUDAHooksInterface& at::detail::getCUDAHooks() {
  static Hooks hooks;
  return hooks;
}
std::optional<DeviceType> at::accelerator::getAccelerator(bool) {
  return DeviceType::CUDA;
}
"""


class _Device:
    """Properties of an H100."""

    name = "NVIDIA H100 80GB HBM3"
    major, minor = 9, 0
    multi_processor_count, warp_size = 132, 32
    regs_per_multiprocessor = 1 << 16
    max_threads_per_multi_processor, max_threads_per_block = 2048, 1024
    shared_memory_per_block_optin = 227 << 10
    total_memory, L2_cache_size = 80 << 30, 50 << 20
    gcnArchName = ""


class _Utils:
    """What Triton asks of a loaded binary."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": _Device.shared_memory_per_block_optin} | {
            "multiprocessor_count": _Device.multi_processor_count,
            "warpSize": _Device.warp_size,
            "max_num_regs": _Device.regs_per_multiprocessor,
        }

    def load_binary(self, *args: Any) -> tuple[int, ...]:
        return 1, 2, 32, 0, 1024

    def unload_module(self, *args: Any) -> None:
        pass


class _Driver:
    """What Triton asks of a device to compile for it."""

    utils, launcher_cls = _Utils(), None

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    @staticmethod
    def is_active() -> bool:
        return True


@dataclass
class Generated:
    """One graph as Inductor compiled it. ``seconds``: of lowering, CPU time."""

    code: str
    seconds: float
    inputs: list[tuple[str, Any]]  # names and fakes
    calls: int = 0

    @property
    def kernels(self) -> set[str]:
        """Texts of distinct kernels, each under the name ``kernel``."""
        found = _KERNEL.findall(self.code)
        return {re.sub(rf"\b{name}\b", "kernel", text) for name, text in found}

    def walk(self) -> Walk:
        """What a call of the wrapper does. Inputs of which the caller has no copy, all
        but parameters, are freed where the wrapper frees them."""
        held, given = [], []
        for name, value in self.inputs:
            given.append(_without_data(value))
            if name.startswith("primals"):
                held.append(given[-1])
        walk = Walk(held)
        with walk.pretended():
            scope: dict[str, Any] = {"__name__": "wrapper"}
            exec(compile(self.code, "wrapper", "exec"), scope)
            scope |= {
                "empty_strided_cuda": _empty,
                "empty_strided_cpu": _empty,
                "reinterpret_tensor": _shown,
                "assert_size_stride": lambda *args: None,
                "assert_alignment": lambda *args: None,
            }
            with walk:
                for x in given:
                    walk.see(x)
                value = x = None
                results = scope["call"](given)
        walk.results = sum(x.nbytes for x in results if isinstance(x, torch.Tensor))
        return walk


class _Stop(BaseException):
    """The code is there."""


@contextlib.contextmanager
def generating() -> Iterator[list[Generated]]:
    """Inside, what Inductor is to compile is for a GPU that is pretended, and is not
    compiled but listed; called, it gives fakes. Layers that repeat are one body."""
    from torch._inductor import compile_fx
    from torch._inductor.graph import GraphLowering

    made: list[Generated] = []
    inner = compile_fx.compile_fx_inner

    def stop(code: str) -> None:
        raise _Stop(code)

    def generate(gm: torch.fx.GraphModule, *args: Any, **how: Any) -> Any:
        inputs = [
            (n.name, n.meta["val"]) for n in gm.graph.find_nodes(op="placeholder")
        ]
        (output,) = gm.graph.find_nodes(op="output")
        results = [n if n is None else n.meta["val"] for n in output.args[0]]
        begun = time.process_time()
        try:
            inner(gm, *args, **how)
        except _Stop as stopped:
            code = stopped.args[0]
        graph = Generated(code, time.process_time() - begun, inputs)
        made.append(graph)

        def give(args: list[Any]) -> list[Any]:
            graph.calls += 1
            mode = next(x.fake_mode for x in args if isinstance(x, FakeTensor))
            args.clear()
            with mode:
                return [_like(x) for x in results]

        give._boxed_call = True  # type: ignore[attr-defined]
        return give

    with (
        pretended(),
        mock.patch.object(GraphLowering, "save_output_code", staticmethod(stop)),
        mock.patch.object(compile_fx, "compile_fx_inner", generate),
    ):
        yield made


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """Inside, Inductor and Triton find an H100."""
    import torch._inductor.fx_passes.misc_patterns as patterns
    import torch._inductor.runtime.triton_helpers as helpers
    import torch._inductor.utils as utils
    import torch.utils._runtime_estimation as estimation
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config
    from torch.utils import _triton

    def always(value: Any) -> Any:
        return staticmethod(lambda *args, **kwargs: value)

    answers = {
        "get_device_properties": _Device,
        "get_compute_capability": 90,
        "current_device": 0,
        "is_available": True,
        "get_raw_stream": 0,
        "synchronize": None,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
        "is_bf16_supported": True,
    }
    of_cuda = {
        "get_device_properties": _Device,
        "current_device": 0,
        "device_count": 1,
        "get_device_capability": (9, 0),
        "synchronize": None,
        "set_device": None,
        "_DeviceGuard": contextlib.nullcontext(),
    }
    triton.runtime.driver.set_active(_Driver())
    with contextlib.ExitStack() as stack:

        def put(where: Any, name: str, value: Any) -> None:
            patch = mock.patch.object(where, name, value, create=True)
            stack.enter_context(patch)

        for name, value in answers.items():
            put(CudaInterface, name, always(value))
        put(CudaInterface.Worker, "get_device_properties", always(_Device))
        put(CudaInterface.Worker, "current_device", always(0))
        for name, value in of_cuda.items():
            put(torch.cuda, name, always(value).__func__)
        put(torch.version, "cuda", "13.0")
        put(torch._C, "_cuda_getCurrentRawStream", always(0).__func__)
        put(helpers, "set_driver_to_gpu", always(None).__func__)
        put(patterns, "_misc_patterns_init", always(None).__func__)
        for module in (utils, estimation):
            put(module, "get_gpu_dram_gbps", always(3350.0).__func__)
            put(module, "get_device_tflops", always(989.0).__func__)
        # To fold constants Inductor makes them on the device.
        settings = {"compile_threads": 1, "force_disable_caches": True}
        settings["joint_graph_constant_folding"] = False
        stack.enter_context(config.patch(settings))
        # What is remembered of this machine, and then of the one that is not.
        _triton.has_triton.cache_clear()
        stack.callback(_triton.has_triton.cache_clear)
        yield


def compile_kernel(text: str) -> int:
    """Compile one of ``kernels`` for sm_90a, under ``pretended``; in how many
    configurations."""
    from torch._inductor.codecache import _load_triton_kernel_from_source

    kernel = _load_triton_kernel_from_source("kernel", text)
    kernel.precompile(warm_cache_only=True)
    return len(kernel.compile_results)


def autograd_library(folder: Path) -> Path:
    """Build what a process preloads (LD_PRELOAD) so that fake CUDA tensors may have
    gradients: torch asks at its start whether there is CUDA."""
    from torch.utils.cpp_extension import include_paths, library_paths

    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(_GUARD)
    command = ["g++", "-std=c++20", "-shared", "-fPIC", str(source)]
    command += [f"-I{path}" for path in include_paths()]
    for path in library_paths():
        command += [f"-L{path}", f"-Wl,-rpath,{path}"]
    command += ["-lc10", "-ltorch_cpu", "-o", str(library)]
    subprocess.run(command, check=True)
    return library


def on_cuda(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """A model of fakes, moved and cast in place: ``to`` cannot swap fakes."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, x in held.items():
                if x is None:
                    continue
                kind = dtype if x.is_floating_point() else x.dtype
                new = torch.empty(x.shape, dtype=kind, device="cuda:0")
                is_parameter = isinstance(x, torch.nn.Parameter)
                held[name] = torch.nn.Parameter(new) if is_parameter else new
    return model


class Walk(TorchDispatchMode):
    """What a call of a wrapper does. ``launches``: of kernels, generated or not;
    ``moved``: bytes that they read and write, each operand and result once;
    ``peak``: bytes that are live at once, with those that were there before."""

    def __init__(self, held: Sequence[Any]) -> None:
        super().__init__()
        self.held, self.live = list(held), dict[int, tuple[Any, int]]()
        self.launches = self.moved = self.peak = self.results = 0

    @contextlib.contextmanager
    def pretended(self) -> Iterator[None]:
        from torch._inductor.async_compile import AsyncCompile

        def kernel(_: Any, name: str, text: str, **how: Any) -> Any:
            return _Kernel(self)

        with pretended(), mock.patch.object(AsyncCompile, "triton", kernel):
            yield

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        values = result if isinstance(result, (tuple, list)) else [result]
        made = [x for x in values if isinstance(x, torch.Tensor)]
        if not op.is_view and "empty" not in op.name() and "wait_" not in op.name():
            self.launch([*args, *(kwargs or {}).values(), *made])
        for x in made:
            self.see(x)
        return result

    def launch(self, operands: Sequence[Any]) -> None:
        self.launches += 1
        tensors = {id(x): x for x in operands if isinstance(x, torch.Tensor)}
        self.moved += sum(x.nbytes for x in tensors.values())

    def see(self, x: Any) -> None:
        """Count a tensor's memory, if it is new."""
        if not isinstance(x, torch.Tensor):
            return
        storage = x.untyped_storage()
        known = self.live.get(storage._cdata)
        if known is None or known[0].expired():
            self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self.live = {k: v for k, v in self.live.items() if not v[0].expired()}
            self.peak = max(self.peak, sum(size for _, size in self.live.values()))


@dataclass
class _Kernel:
    walk: Walk

    def run(self, *args: Any, **how: Any) -> None:
        self.walk.launch(args)


def _like(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _without_data(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _shown(x: torch.Tensor, size: Any, stride: Any, offset: int) -> torch.Tensor:
    return x.as_strided(size, stride, x.storage_offset() + offset)


def _empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")
