"""Storage writers and readers over folders and S3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from .s3_filesystem import local


class DistributedFileSystemWriter(FileSystemWriter):
    """Calls its hooks before and after the data is written."""

    def __init__(
        self,
        path: str,
        pre_write_hooks: Sequence[Callable[[Any], None]] = (),
        post_write_hooks: Sequence[Callable[[Any], None]] = (),
        **options: Any,
    ) -> None:
        super().__init__(local(path), **options)
        self.pre_write_hooks, self.post_write_hooks = pre_write_hooks, post_write_hooks
        self.is_coordinator = False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.is_coordinator = is_coordinator
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        for hook in self.pre_write_hooks:
            hook(self)
        done = super().write_data(*args, **kwargs)
        for hook in self.post_write_hooks:
            hook(self)
        return done


class DistributedFileSystemReader(FileSystemReader):
    """Reads what `DistributedFileSystemWriter` wrote."""

    def __init__(self, path: str) -> None:
        super().__init__(local(path))
