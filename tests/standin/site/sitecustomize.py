"""Gives every Python process the stand-in of SMP, once it imports `torch.sagemaker`, if SMP_STANDIN_INSTALL is set."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


class Finder:
    """Shows `torch.sagemaker` where torch is looked for, and installs the stand-in when it is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == "torch":
            spec = PathFinder.find_spec(name, path)
            if spec is not None and spec.submodule_search_locations is not None:
                spec.submodule_search_locations.append(str(importlib.import_module("tests.standin").HERE))
            return spec
        if name == "torch.sagemaker":
            importlib.import_module("tests.standin").install()
        return None  # found like any other: it is on torch's path by now


if os.environ.get("SMP_STANDIN_INSTALL"):
    sys.meta_path.insert(0, Finder())
