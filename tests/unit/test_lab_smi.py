"""The lab's nvidia-smi prints what the real one printed (tests/lab/captures)."""

from __future__ import annotations

import time
from xml.etree import ElementTree

import pytest

from tests.lab import smi

WHEN = time.mktime(time.strptime("Sun Nov 29 12:24:54 2026"))


def real_gpu(**changes: object) -> smi.GpuView:
    """The GPU that the captures were made on."""
    values = {
        "index": 0,
        "minor": 0,
        "uuid": "GPU-a5edddaa-6e4a-9986-b9b5-dab572bc80a9",
        "bus_id": "00000000:00:06.0",
        "serial": "1653724026906",
    }
    return smi.GpuView(**{**values, **changes})  # type: ignore[arg-type]


def ask(line: str, *gpus: smi.GpuView, processes: tuple[smi.ProcessView, ...] = ()) -> smi.Answer:
    """One call of nvidia-smi."""
    view = smi.View(list(gpus) or [real_gpu()], list(processes), WHEN)
    return smi.render(line.split(), view)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("", "table"),
        ("-q", "q"),
        ("-q -x", "qx"),
        ("--xml-format --query", "qx"),
        ("--help-query-gpu", "help_gpu"),
        ("--help-query-compute-apps", "help_apps"),
        ("-L", "list"),
        ("pmon -c 1", "pmon"),
        ("--query-gpu=index,memory.used --format=csv,noheader", "query_units"),
        ("--query-gpu=index,memory.used --format=csv,noheader,nounits", "query_used"),
        ("--query-compute-apps=pid,name --format=csv,noheader", "apps"),
        ("--query-gpu=bogus --format=csv", "bad_field"),
        ("--nosuch", "bad_flag"),
        ("-i 7", "bad_index"),
    ],
)
def test_as_captured(line: str, name: str) -> None:
    answer = ask(line)
    assert answer.text == smi.capture(name)
    assert answer.rc == smi.capture_codes()[name]


def test_no_gpu_that_can_be_opened() -> None:
    answer = smi.render(["-L"], smi.View([], [], WHEN))
    assert (answer.text, answer.rc) == (smi.capture("no_dev0"), 6)


def test_csv_with_header_and_units() -> None:
    fields = "timestamp,index,uuid,name,memory.used,memory.total,utilization.gpu,power.draw"
    answer = ask(f"--query-gpu={fields} --format=csv", real_gpu(used=76115, utilization=100))
    head, row = answer.text.splitlines()
    assert head == (
        "timestamp, index, uuid, name, memory.used [MiB], memory.total [MiB],"
        " utilization.gpu [%], power.draw [W]"
    )
    assert row == (
        "2026/11/29 12:24:54.000, 0, GPU-a5edddaa-6e4a-9986-b9b5-dab572bc80a9, NVIDIA H200,"
        " 76115 MiB, 143771 MiB, 100 %, 612.40 W"
    )


def test_a_value_that_is_no_number_gets_no_unit() -> None:
    gpu = real_gpu(values={"memory.used": "[N/A]"})
    assert ask("--query-gpu=memory.used --format=csv,noheader", gpu).text == "[N/A]\n"


def test_selection_by_index_uuid_and_bus() -> None:
    gpus = [real_gpu(), real_gpu(index=1, uuid="GPU-b", bus_id="00000000:1B:00.0")]
    for wanted in ("1", "GPU-b", "00000000:1B:00.0", "0000:1b:00.0"):
        answer = ask(f"--query-gpu=index --format=csv,noheader -i {wanted}", *gpus)
        assert answer.text == "1\n"
    assert ask("--query-gpu=index --format=csv,noheader --id=1,0", *gpus).text == "0\n1\n"


def test_processes_in_all_forms() -> None:
    process = smi.ProcessView(0, 4242, "python3", 76115)
    gpu = real_gpu(used=76115)
    query = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory --format=csv"
    assert ask(query, gpu, processes=(process,)).text == (
        "gpu_uuid, pid, process_name, used_gpu_memory [MiB]\n"
        "GPU-a5edddaa-6e4a-9986-b9b5-dab572bc80a9, 4242, python3, 76115 MiB\n"
    )
    table = ask("", gpu, processes=(process,)).text
    assert "No running processes found" not in table
    assert {len(line) for line in table.splitlines()[1:] if line} == {91}
    log = ask("-q", gpu, processes=(process,)).text
    assert "        Process ID                                     : 4242\n" in log
    assert "        Used                                           : 76115 MiB\n" in log


def test_xml_says_of_each_gpu_what_the_text_says() -> None:
    gpus = [
        real_gpu(values={"memory.used": "[N/A]"}),
        real_gpu(
            index=1,
            minor=5,
            uuid="GPU-b",
            bus_id="00000000:1B:00.0",
            serial="77",
            used=76115,
            utilization=100,
        ),
    ]
    log = ask("-q -x", *gpus, processes=(smi.ProcessView(1, 4242, "a<b>&c", 76109),)).text
    root = ElementTree.fromstring(log)
    assert root.findtext("attached_gpus") == "2"
    empty, held = root.findall("gpu")
    assert empty.findtext("fb_memory_usage/used") == "[N/A]"
    assert empty.find("processes/process_info") is None
    assert held.get("id") == held.findtext("pci/pci_bus_id") == "00000000:1B:00.0"
    assert {name: held.findtext(name) for name in ("uuid", "serial", "minor_number")} == {
        "uuid": "GPU-b",
        "serial": "77",
        "minor_number": "5",
    }
    assert held.findtext("pci/pci_bus") == "1B"
    assert held.findtext("fb_memory_usage/used") == "76115 MiB"
    assert held.findtext("fb_memory_usage/free") == "67041 MiB"
    assert held.findtext("bar1_memory_usage/used") == "1 MiB"
    assert held.findtext("utilization/gpu_util") == "100 %"
    process = held.find("processes/process_info")
    assert process is not None
    assert process.findtext("pid") == "4242"
    assert process.findtext("process_name") == "a<b>&c"
    assert process.findtext("used_memory") == "76109 MiB"


def test_xml_is_a_form_of_the_log_only() -> None:
    assert ask("-x").rc == 255


def test_lost_gpu_is_named_and_left_out() -> None:
    gpus = [real_gpu(), real_gpu(index=1, bus_id="00000000:1B:00.0", lost=True)]
    answer = ask("--query-gpu=index --format=csv,noheader", *gpus)
    assert answer.text == (
        "0\nUnable to determine the device handle for GPU0000:1B:00.0: Unknown Error\n"
    )


def test_loop() -> None:
    line = "--query-gpu=index --format=csv,noheader"
    assert ask(f"{line} -lms 200").loop_ms == 200
    assert ask(f"{line} --loop-ms=50").loop_ms == 50
    assert ask(f"{line} -l 2").loop_ms == 2000


def test_every_named_error_has_text_and_code() -> None:
    names = smi.error_names()
    assert {"no_dev0", "no_ctl", "no_lib", "nobody_devmode", "driver_mismatch"} <= set(names)
    assert smi.error_answer("driver_mismatch").rc == 18
    assert smi.error_answer("no_lib").text == smi.capture("no_lib")
