"""The ten dearest operators of --profile: which rows count, and by which time."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from trainer.profile import Operator, TorchProfiler, operators, table


def test_calls_in_the_table_are_those_in_the_trace():
    x = torch.ones(8, 8)
    with torch.profiler.profile() as profiler:
        for _ in range(3):
            with torch.profiler.record_function("mine"):
                torch.mm(x, x)
    rows = {row.name: row for row in operators(profiler, "cpu")}
    assert rows["aten::mm"].calls == 3 and "mine" not in rows
    total = sum(row.self_us for row in rows.values())
    spent = sum(e.self_cpu_time_total for e in profiler.key_averages() if e.key != "mine")
    assert total == pytest.approx(spent)


def test_a_gpu_s_operators_by_the_time_of_their_kernels():
    names = "key count device_type self_cpu_time_total self_device_time_total is_user_annotation"
    rows = [
        ("aten::gelu", 1, DeviceType.CPU, 90, 10, False),
        ("aten::mm", 1, DeviceType.CPU, 20, 30, False),
        ("sm90_gemm_kernel", 1, DeviceType.CUDA, 0, 30, False),  # the same 30
        ("forward", 1, DeviceType.CPU, 500, 0, True),
        ("forward", 1, DeviceType.CUDA, 0, 500, True),
    ]
    found = [SimpleNamespace(**dict(zip(names.split(), row, strict=True))) for row in rows]
    profiler = SimpleNamespace(key_averages=lambda: found)
    assert operators(profiler, "cuda") == [("aten::mm", 1, 30), ("aten::gelu", 1, 10)]
    assert operators(profiler, "cpu") == [("aten::gelu", 1, 90), ("aten::mm", 1, 20)]


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_gpu_whose_driver_tells_nothing(tmp_path):
    tool = TorchProfiler(torch.device("cuda"), tmp_path / "x.json")
    tool.prepare()
    tool.start()
    torch.ones(8, 8).mm(torch.ones(8, 8))
    tool.stop()
    said = tool.report(1)
    assert "on cpu (the driver told of no kernels)" in said and "aten::mm" in said


def test_a_short_table_has_no_others():
    lines = table([Operator("aten::mm", 1234, 3000.0), Operator("x" * 80, 1, 1000.0)])
    assert [line.split() for line in lines[1:]] == [
        ["aten::mm", "1,234", "3.00", "75.0%"],
        ["x" * 60, "1", "1.00", "25.0%"],
    ]
    assert len(table([])) == 1
