"""Compile a kernel of triton to the code of an H100, which needs no GPU, and print where triton is.

A script: triton reads the source of the kernel from a file.
"""

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel


@triton.jit
def double(x, y, n: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, n)
    tl.store(y + i, tl.exp(tl.load(x + i)) * 2)


signature = {"x": "*fp32", "y": "*fp32", "n": "constexpr"}
made = compile_kernel(ASTSource(double, signature, {(2,): 64}), target=GPUTarget("cuda", 90, 32))
print(triton.__file__, len(made.asm["cubin"]) > 0)
