"""What nvidia-smi prints, byte for byte as the real one (captures/), from the driver's numbers.

Pure functions: `render(arguments, view)` gives text, exit code and loop interval.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from xml.sax.saxutils import escape

CAPTURES = Path(__file__).parent / "captures"
DRIVER = "580.159.04"
TOTAL, RESERVED = 143771, 616
# Bytes round up: the real tool says 143156 MiB free of 143771 with 616 reserved and 0 used.
FREE_WHEN_EMPTY = 143156
NO_DATA = "[No data]"


@dataclass
class GpuView:
    """One GPU as it is at the moment of the answer."""

    index: int
    minor: int
    uuid: str
    bus_id: str
    serial: str
    used: int = 0
    utilization: int = 0
    lost: bool = False
    values: dict[str, str] = field(default_factory=dict)  # fault: field -> text


@dataclass
class ProcessView:
    """One process in the driver's list, with the pid it has for the caller."""

    gpu: int
    pid: int
    name: str
    used: int


@dataclass
class View:
    """Everything an answer depends on."""

    gpus: list[GpuView]
    processes: list[ProcessView]
    now: float = 0.0


@dataclass
class Answer:
    """What the tool prints and how it ends; loop_ms > 0: ask again after that long."""

    text: str
    rc: int = 0
    loop_ms: int = 0


def capture(name: str) -> str:
    """A captured output of the real tool."""
    return (CAPTURES / f"{name}.out").read_text()


@cache
def capture_codes() -> dict[str, int]:
    """The captured exit codes by name."""
    lines = (CAPTURES / "exit-codes.txt").read_text().split("\n")
    return {line.split()[0]: int(line.split("rc=")[1]) for line in lines if " rc=" in line}


# From NVIDIA's documentation and bug threads rather than captured.
DOCUMENTED_ERRORS = {
    "driver_mismatch": (
        "Failed to initialize NVML: Driver/library version mismatch\n"
        "NVML library version: 580.159\n",
        18,
    ),
    "gpu_lost": (
        "Unable to determine the device handle for GPU 0000:1B:00.0: GPU is lost.  "
        "Reboot the system to recover this GPU\n",
        15,
    ),
    "not_loaded": (
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
        "Make sure that the latest NVIDIA driver is installed and running.\n\n",
        9,
    ),
    "unknown_error": ("Failed to initialize NVML: Unknown Error\n", 255),
    "empty": ("", 0),
}


def error_names() -> list[str]:
    """The names `fault HOST smi-error NAME` knows."""
    captured = [name for name, code in capture_codes().items() if code]
    return sorted([*captured, *DOCUMENTED_ERRORS])


def error_answer(name: str) -> Answer:
    """The text and exit code of a named error."""
    if name in DOCUMENTED_ERRORS:
        return Answer(*DOCUMENTED_ERRORS[name])
    return Answer(capture(name), capture_codes()[name])


# --- fields -------------------------------------------------------------------------------------

ALIASES = {
    "gpu_name": "name",
    "gpu_uuid": "uuid",
    "gpu_serial": "serial",
    "gpu_bus_id": "pci.bus_id",
    "clocks.gr": "clocks.current.graphics",
    "clocks.sm": "clocks.current.sm",
    "clocks.mem": "clocks.current.memory",
}
UNITS = {
    "memory.total": "MiB",
    "memory.reserved": "MiB",
    "memory.used": "MiB",
    "memory.free": "MiB",
    "utilization.gpu": "%",
    "utilization.memory": "%",
    "power.draw": "W",
    "power.draw.average": "W",
    "power.draw.instant": "W",
    "power.limit": "W",
    "enforced.power.limit": "W",
    "clocks.current.graphics": "MHz",
    "clocks.current.sm": "MHz",
    "clocks.current.memory": "MHz",
    "used_gpu_memory": "MiB",
}
FIXED = {
    "name": "NVIDIA H200",
    "driver_version": DRIVER,
    "vbios_version": "96.00.A5.00.1A",
    "pci.domain": "0x0000",
    "pci.device": "0x00",
    "pci.device_id": "0x233510DE",
    "pci.sub_device_id": "0x18BF10DE",
    "pci.baseClass": "0x3",
    "pci.subClass": "0x2",
    "display_attached": "Yes",
    "display_mode": "[Requested functionality has been deprecated]",
    "display_active": "Disabled",
    "persistence_mode": "Enabled",
    "addressing_mode": "None",
    "accounting.mode": "Disabled",
    "accounting.buffer_size": "4000",
    "mig.mode.current": "Disabled",
    "mig.mode.pending": "Disabled",
    "compute_mode": "Default",
    "fan.speed": "[N/A]",
    "ecc.mode.current": "Enabled",
    "ecc.mode.pending": "Enabled",
    "ecc.errors.uncorrected.volatile.total": "0",
    "ecc.errors.corrected.volatile.total": "0",
    "gpu_recovery_action": "None",
    "gom.current": "[N/A]",
    "temperature.memory": "39",
    "power.management": "Enabled",
    "power.limit": "700.00",
    "enforced.power.limit": "700.00",
    "power.draw.instant": "78.29",
    "clocks.current.memory": "3201",
    "memory.total": str(TOTAL),
    "memory.reserved": str(RESERVED),
    "pstate": "P0",
    "pcie.link.gen.current": "5",
    "pcie.link.width.current": "16",
}


def stamp(now: float) -> str:
    """2026/11/29 12:24:54.123"""
    return time.strftime("%Y/%m/%d %H:%M:%S", time.localtime(now)) + f".{int(now % 1 * 1000):03d}"


def gpu_field(name: str, gpu: GpuView, view: View) -> str | None:
    """The value of a --query-gpu field without its unit; None: there is no such field."""
    busy = gpu.utilization > 0
    if name in gpu.values:
        return gpu.values[name]
    changing = {
        "index": str(gpu.index),
        "uuid": gpu.uuid,
        "serial": gpu.serial,
        "pci.bus_id": gpu.bus_id,
        "pci.bus": "0x" + gpu.bus_id[9:11],
        "count": str(len([g for g in view.gpus if not g.lost])),
        "memory.used": str(gpu.used),
        "memory.free": str(max(0, FREE_WHEN_EMPTY - gpu.used)),
        "utilization.gpu": str(gpu.utilization),
        "utilization.memory": str(gpu.utilization * 6 // 10),
        "temperature.gpu": "61" if busy else "38",
        "power.draw": "612.40" if busy else "110.27",
        "power.draw.average": "612.40" if busy else "110.27",
        "clocks.current.graphics": "1980" if busy else "345",
        "clocks.current.sm": "1980" if busy else "345",
        "timestamp": stamp(view.now),
    }
    return changing.get(name, FIXED.get(name))


PROCESS_ALIASES = {"name": "process_name", "used_memory": "used_gpu_memory"}


def process_field(name: str, process: ProcessView, gpu: GpuView, view: View) -> str | None:
    """The value of a --query-compute-apps field; None: there is no such field."""
    values = {
        "timestamp": stamp(view.now),
        "gpu_name": FIXED["name"],
        "gpu_bus_id": gpu.bus_id,
        "gpu_serial": gpu.serial,
        "gpu_uuid": gpu.uuid,
        "pid": str(process.pid),
        "process_name": process.name,
        "used_gpu_memory": gpu.values.get("used_gpu_memory", str(process.used)),
    }
    return values.get(name)


def field_name(name: str) -> str | None:
    """The first name of a field with a value of a GPU; None: there is no such field."""
    known = {**ALIASES, "used_memory": "used_gpu_memory"}.get(name, name)
    gpu = GpuView(0, 0, "", "00000000:00:00.0", "")
    found = known == "used_gpu_memory" or gpu_field(known, gpu, View([], [])) is not None
    return known if found else None


def with_unit(name: str, value: str, units: bool) -> str:
    """'0' -> '0 MiB' where the field has a unit and the value is a number."""
    if units and name in UNITS and re.fullmatch(r"[\d.]+", value):
        return f"{value} {UNITS[name]}"
    return value


def header(names: list[str]) -> str:
    """The CSV header: units in brackets, also with nounits."""
    return ", ".join(f"{name} [{UNITS[name]}]" if name in UNITS else name for name in names) + "\n"


# --- the command line ---------------------------------------------------------------------------


class BadArguments(Exception):
    """The tool's own complaint, with its exit code."""

    def __init__(self, text: str, rc: int) -> None:
        super().__init__(text)
        self.text, self.rc = text, rc


@dataclass
class Request:
    """The command line, understood."""

    mode: str = "table"
    ids: str = ""
    fields: list[str] = field(default_factory=list)
    format: list[str] = field(default_factory=list)
    loop_ms: int = 0
    xml: bool = False


SWITCHES = {
    "-L": "list",
    "--list-gpus": "list",
    "-q": "q",
    "--query": "q",
    "pmon": "pmon",
    "--help-query-gpu": "help_gpu",
    "--help-query-compute-apps": "help_apps",
}
HELPS = ("help_gpu", "help_apps")
QUERIES = {
    "--query-gpu": "gpu",
    "--query-compute-apps": "apps",
    "-h": "help",
    "--help": "help",
}
IGNORED_WITH_VALUE = {"-d", "--display", "-c", "--count", "-s", "-f", "--filename"}


def understand(arguments: list[str]) -> Request:
    """Read the command line as the real tool does."""
    request, rest = Request(), list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")

        def argument(name: str = name, equals: str = equals, value: str = value) -> str:
            if equals:
                return value
            if not rest:
                raise BadArguments(
                    f"ERROR: Option {name} requires an argument. Please run 'nvidia-smi -h'.\n", 255
                )
            return rest.pop(0)

        if word in SWITCHES:
            request.mode = SWITCHES[word]
        elif word in ("-x", "--xml-format") and ("-q" in arguments or "--query" in arguments):
            request.xml = True
        elif name in QUERIES and equals:
            request.mode, request.fields = QUERIES[name], [f.strip() for f in value.split(",")]
        elif name in ("-i", "--id"):
            request.ids = argument()
        elif name == "--format" and equals:
            request.format = value.split(",")
        elif name in ("-l", "--loop"):
            numeric = equals or (rest and rest[0].isdigit())
            request.loop_ms = 1000 * int(argument() if numeric else "5")
        elif name in ("-lms", "--loop-ms"):
            request.loop_ms = int(argument())
        elif name in IGNORED_WITH_VALUE:
            argument()
        else:
            raise BadArguments(capture("bad_flag").replace("--nosuch", word), 255)
    return request


def selected(view: View, ids: str) -> list[GpuView]:
    """The GPUs that -i names: by index, UUID or bus id, comma separated."""
    if not ids:
        return view.gpus
    found = []
    for word in ids.split(","):
        text = word.strip().lower()
        for gpu in view.gpus:
            bus = gpu.bus_id.lower()
            if text in (str(gpu.index), gpu.uuid.lower(), bus, bus[4:]):
                found.append(gpu)
                break
        else:
            raise BadArguments(capture("bad_index"), 6)
    return sorted({gpu.index: gpu for gpu in found}.values(), key=lambda gpu: gpu.index)


def csv_options(request: Request) -> tuple[bool, bool]:
    """(header wanted, units wanted)."""
    if not request.format or request.format[0] != "csv":
        raise BadArguments(
            '"--format=" switch is missing. Consider using "--format=csv".\n'
            if not request.format
            else f'Invalid value "{request.format[0]}" for "--format=" switch.\n',
            2,
        )
    return "noheader" not in request.format, "nounits" not in request.format


def invalid_field(name: str) -> BadArguments:
    """The complaint about a field that does not exist."""
    return BadArguments(capture("bad_field").replace("bogus", name), 2)


def query_gpu(request: Request, view: View, gpus: list[GpuView]) -> str:
    """--query-gpu=..."""
    with_header, units = csv_options(request)
    names = [ALIASES.get(name, name) for name in request.fields]
    known = view.gpus[0] if view.gpus else GpuView(0, 0, "", "00000000:00:00.0", "")
    for asked, name in zip(request.fields, names, strict=True):
        if name not in known.values and gpu_field(name, known, view) is None:
            raise invalid_field(asked)
    text = header(names) if with_header else ""
    for gpu in gpus:
        if gpu.lost:
            text += lost_line(gpu)
            continue
        row = [with_unit(name, gpu_field(name, gpu, view) or "", units) for name in names]
        text += ", ".join(row) + "\n"
    return text


def query_apps(request: Request, view: View, gpus: list[GpuView]) -> str:
    """--query-compute-apps=..."""
    with_header, units = csv_options(request)
    names = [PROCESS_ALIASES.get(name, name) for name in request.fields]
    probe = GpuView(0, 0, "", "", "")
    for asked, name in zip(request.fields, names, strict=True):
        if process_field(name, ProcessView(0, 0, "", 0), probe, view) is None:
            raise invalid_field(asked)
    text = header(names) if with_header else ""
    for gpu in gpus:
        if gpu.lost:
            text += lost_line(gpu)
            continue
        for process in view.processes:
            if process.gpu == gpu.index:
                row = [process_field(name, process, gpu, view) or "" for name in names]
                pairs = zip(names, row, strict=True)
                text += ", ".join(with_unit(name, value, units) for name, value in pairs) + "\n"
    return text


def lost_line(gpu: GpuView) -> str:
    """What the tool says about a GPU that fell off the bus."""
    return f"Unable to determine the device handle for GPU{gpu.bus_id[4:]}: Unknown Error\n"


def list_gpus(gpus: list[GpuView]) -> str:
    """-L"""
    return "".join(
        lost_line(gpu) if gpu.lost else f"GPU {gpu.index}: NVIDIA H200 (UUID: {gpu.uuid})\n"
        for gpu in gpus
    )


def ctime(now: float) -> str:
    """Sun Nov 29 12:24:54 2026"""
    return time.strftime("%a %b %e %H:%M:%S %Y", time.localtime(now))


def table_rows(gpu: GpuView) -> str:
    """The three lines of one GPU in the table."""
    busy = gpu.utilization > 0
    watts, celsius = ("612", "61") if busy else ("110", "38")
    memory = f"{gpu.values.get('memory.used', str(gpu.used) + 'MiB')} / {TOTAL}MiB"
    return (
        f"|{gpu.index:4}  NVIDIA H200                    On  "
        f"|   {gpu.bus_id} Off |                    0 |\n"
        f"| N/A   {celsius}C    P0            {watts}W /  700W "
        f"|{memory:>23} |{gpu.utilization:7}%      Default |\n"
        "|                                         |                        "
        "|             Disabled |\n"
        "+-----------------------------------------+------------------------"
        "+----------------------+\n"
    )


def short_name(name: str, width: int = 36) -> str:
    """The tool keeps the end of long names."""
    return name if len(name) <= width else "..." + name[-(width - 3) :]


def process_row(process: ProcessView) -> str:
    """One line of the table's process list."""
    return (
        f"|{process.gpu:5}   N/A  N/A{process.pid:16}      C   "
        f"{short_name(process.name):<37}{process.used:6}MiB |\n"
    )


def table(view: View, gpus: list[GpuView]) -> str:
    """The table that a bare `nvidia-smi` prints."""
    lost = "".join(lost_line(gpu) for gpu in gpus if gpu.lost)
    gpus = [gpu for gpu in gpus if not gpu.lost]
    lines = capture("table").splitlines(keepends=True)
    text = lost + f"{ctime(view.now)}       \n" + "".join(lines[1:8])
    text += "".join(table_rows(gpu) for gpu in gpus)
    text += "".join(lines[12:18])
    wanted = {gpu.index for gpu in gpus}
    rows = [process_row(p) for p in view.processes if p.gpu in wanted]
    return text + ("".join(rows) or lines[18]) + lines[19]


def q_processes(view: View, gpu: GpuView) -> str:
    """The Processes section of -q."""
    mine = [process for process in view.processes if process.gpu == gpu.index]
    if not mine:
        return "    Processes                                          : None\n"
    text = "    Processes\n"
    for process in mine:
        for name, value in (
            ("        GPU instance ID", "N/A"),
            ("        Compute instance ID", "N/A"),
            ("        Process ID", str(process.pid)),
            ("            Type", "C"),
            ("            Name", process.name),
            ("            Used GPU Memory", f"{process.used} MiB"),
        ):
            text += f"{name:<55}: {value}\n"
    return text


def memory_texts(gpu: GpuView) -> tuple[str, str]:
    """What -q says of a GPU's used and free memory."""
    used = gpu.values.get("memory.used", f"{gpu.used} MiB")
    return used, gpu.values.get("memory.free", f"{max(0, FREE_WHEN_EMPTY - gpu.used)} MiB")


def q_block(block: str, view: View, gpu: GpuView) -> str:
    """One GPU of -q: the captured text with this GPU's values."""
    used, free = memory_texts(gpu)
    memory = re.compile(r"(FB Memory Usage\n(?:.*\n){2}        Used +: ).*(\n        Free +: ).*")
    block = memory.sub(lambda m: f"{m[1]}{used}{m[2]}{free}", block)
    block = block.replace("00000000:00:06.0", gpu.bus_id)
    block = block.replace("GPU-a5edddaa-6e4a-9986-b9b5-dab572bc80a9", gpu.uuid)
    block = block.replace("1653724026906", gpu.serial)
    block = re.sub(r"(Minor Number +: ).*", rf"\g<1>{gpu.minor}", block)
    block = re.sub(r"(        Bus  +: ).*", rf"\g<1>0x{gpu.bus_id[9:11]}", block)
    block = re.sub(r"(        Domain  +: ).*", rf"\g<1>0x{gpu.bus_id[4:8]}", block)
    block = re.sub(r"(        Device  +: ).*", rf"\g<1>0x{gpu.bus_id[12:14]}", block)
    block = re.sub(r"(Utilization\n        GPU +: ).*", rf"\g<1>{gpu.utilization} %", block)
    if gpu.utilization:
        block = block.replace(": 38 C", ": 61 C").replace(": 100.27 W", ": 612.40 W")
    processes = q_processes(view, gpu)
    return re.sub(r"    Processes +: None\n", lambda _: processes, block)


def q_log(view: View, gpus: list[GpuView]) -> str:
    """-q"""
    template = capture("q")
    start = template.index("GPU 00000000:00:06.0")
    end = template.rindex("\n")
    head, block, tail = template[:start], template[start:end], template[end:]
    head = re.sub(r"(Timestamp +: ).*", rf"\g<1>{ctime(view.now)}", head)
    head = re.sub(r"(Attached GPUs +: ).*", rf"\g<1>{len(view.gpus)}", head)
    lost = "".join(lost_line(gpu) for gpu in gpus if gpu.lost)
    blocks = [q_block(block, view, gpu) for gpu in gpus if not gpu.lost]
    return lost + head + "\n".join(blocks) + tail


def xml_with(text: str, values: dict[str, str]) -> str:
    """XML with other texts in the first elements of these names."""
    for tag, value in values.items():
        before, opening, after = text.partition(f"<{tag}>")
        text = before + opening + escape(value) + after[after.index("<") :]
    return text


def xml_processes(view: View, gpu: GpuView) -> str:
    """The processes element of -q -x."""
    text = "\t\t<processes>\n"
    for process in view.processes:
        if process.gpu == gpu.index:
            text += (
                "\t\t\t<process_info>\n"
                "\t\t\t\t<gpu_instance_id>N/A</gpu_instance_id>\n"
                "\t\t\t\t<compute_instance_id>N/A</compute_instance_id>\n"
                f"\t\t\t\t<pid>{process.pid}</pid>\n"
                "\t\t\t\t<type>C</type>\n"
                f"\t\t\t\t<process_name>{escape(process.name)}</process_name>\n"
                f"\t\t\t\t<used_memory>{process.used} MiB</used_memory>\n"
                "\t\t\t</process_info>\n"
            )
    return text + "\t\t</processes>\n"


def xml_block(block: str, view: View, gpu: GpuView) -> str:
    """One GPU of -q -x: the captured text with this GPU's values."""
    used, free = memory_texts(gpu)
    values = {
        "serial": gpu.serial,
        "uuid": gpu.uuid,
        "minor_number": str(gpu.minor),
        "pci_bus": gpu.bus_id[9:11],
        "pci_device": gpu.bus_id[12:14],
        "pci_domain": gpu.bus_id[4:8],
        "pci_bus_id": gpu.bus_id,
        "used": used,
        "free": free,
        "gpu_util": f"{gpu.utilization} %",
    }
    if gpu.utilization:
        values |= {"gpu_temp": "61 C", "average_power_draw": "612.40 W"}
    block = block.replace('<gpu id="00000000:00:06.0">', f'<gpu id="{gpu.bus_id}">')
    block = block.replace("\t\t<processes>\n\t\t</processes>\n", xml_processes(view, gpu))
    return xml_with(block, values)


def xml_log(view: View, gpus: list[GpuView]) -> str:
    """-q -x"""
    template = capture("qx")
    start, end = template.index("\t<gpu id="), template.index("</nvidia_smi_log>")
    attached = {"timestamp": ctime(view.now), "attached_gpus": str(len(view.gpus))}
    text = "".join(lost_line(gpu) for gpu in gpus if gpu.lost)
    text += xml_with(template[:start], attached)
    text += "".join(xml_block(template[start:end], view, gpu) for gpu in gpus if not gpu.lost)
    return text + template[end:]


def pmon(view: View, gpus: list[GpuView]) -> str:
    """pmon -c 1"""
    lines = capture("pmon").splitlines(keepends=True)
    text = lines[0] + lines[1]
    for gpu in gpus:
        rows = [p for p in view.processes if p.gpu == gpu.index and p.name != NO_DATA]
        for process in rows:
            name = Path(process.name).name[:14]
            text += f"{gpu.index:5}{process.pid:12}     C" + "      -" * 6 + f"    {name:<15}\n"
        if not rows:
            text += lines[2].replace("    0 ", f"{gpu.index:5} ", 1)
    return text


def render(arguments: list[str], view: View) -> Answer:
    """Answer one call of nvidia-smi."""
    try:
        request = understand(arguments)
        if request.mode == "help":
            return Answer(f"NVIDIA System Management Interface -- v{DRIVER}\n")
        if request.mode in HELPS:
            return Answer(capture(request.mode))
        if not view.gpus:
            raise BadArguments(capture("no_dev0"), 6)
        gpus = selected(view, request.ids)
        makers = {
            "gpu": lambda: query_gpu(request, view, gpus),
            "apps": lambda: query_apps(request, view, gpus),
            "list": lambda: list_gpus(gpus),
            "q": lambda: xml_log(view, gpus) if request.xml else q_log(view, gpus),
            "pmon": lambda: pmon(view, gpus),
            "table": lambda: table(view, gpus),
        }
        return Answer(makers[request.mode](), 0, request.loop_ms)
    except BadArguments as error:
        return Answer(error.text, error.rc)
