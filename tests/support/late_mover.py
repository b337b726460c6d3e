"""A stand-in for copies on side streams that is as late and as early as their order allows."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class LateMover:
    """Copies to the host when they are waited for, and shows garbage until a copy back is."""

    def __init__(self):
        self.device = torch.device("cpu")
        self.most_waiting = self._waiting = self.out_copies = self.back_copies = self.pins = 0
        self.unwaited = set()
        self.elsewhere = False

    def pinned(self, nbytes):
        self.pins += 1
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def out(self, host, device):
        source = StorageWeakRef(device.untyped_storage())
        view = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_with_weak_ptr(source.cdata))
        pointer, self.out_copies = view.data_ptr(), self.out_copies + 1
        del view

        def arrives():
            assert not source.expired(), "dropped before its copy was waited for"
            kept = torch.UntypedStorage._new_with_weak_ptr(source.cdata)
            assert kept.data_ptr() == pointer
            host.copy_(torch.empty(0, dtype=torch.uint8).set_(kept))

        return self._under_way(arrives, len(host))

    def back(self, device, host):
        device.fill_(255)
        self.back_copies += 1
        return self._under_way(lambda: device.copy_(host), len(host))

    def _under_way(self, act, size):
        copy = (act, size)
        self.unwaited.add(copy)
        self._waiting += size
        self.most_waiting = max(self.most_waiting, self._waiting)
        return copy

    def wait(self, copied):
        self.unwaited.remove(copied)
        self._waiting -= copied[1]
        copied[0]()

    def computing(self):
        return nullcontext()

    def is_computing(self):
        return not self.elsewhere
