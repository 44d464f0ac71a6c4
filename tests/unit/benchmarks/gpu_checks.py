"""Checks for test_gpu.py: some pass, some do not."""

from __future__ import annotations

import os
import time

from benchmarks.gpu.setting import NotApplicableError, Row, Setting


def passes(setting: Setting) -> list[Row]:
    return [{"device": setting.device}]


def raises(setting: Setting) -> list[Row]:
    raise AssertionError("token 3 differs")


def is_skipped(setting: Setting) -> list[Row]:
    raise NotApplicableError("no second device")


def hangs(setting: Setting) -> list[Row]:
    print("last words", flush=True)
    time.sleep(1000)
    return []


def dies(setting: Setting) -> list[Row]:
    os._exit(3)
