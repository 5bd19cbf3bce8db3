"""The optional C extension; everything else about the package is in pyproject.toml."""

import platform
import sys
from glob import glob

from setuptools import Extension, setup

flags = ["-O3", "-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi"]
if sys.platform == "linux":
    flags.append(
        "-fopenmp"
    )  # compiled for OpenMP but not linked to one: at run time torch's own is found, and its threads shared
    if platform.machine() not in ("x86_64", "aarch64"):
        flags.remove("-fopenmp")

setup(
    ext_modules=[
        Extension(
            "outrider.kernels._skinny",
            ["outrider/kernels/_skinny.c"],
            depends=glob("outrider/kernels/*.h"),
            extra_compile_args=flags,
            py_limited_api=True,
            optional=True,  # without a compiler the installation succeeds and models run on torch's own products
        )
    ]
)
