"""The facts of a machine, and how they are collected from its readings."""

from __future__ import annotations

from msgspec import Struct


class Disk(Struct, frozen=True, kw_only=True):
    """A file system that we write to. path: a folder on it; purpose: what we write there.

    writable: by this user; read_only: it is mounted so.
    """

    path: str
    purpose: str
    free_bytes: int
    total_bytes: int
    writable: bool = True
    read_only: bool = False


class Unit(Struct, frozen=True, kw_only=True):
    """One of our systemd units. status: exit status of its last process; restarts: since it began.

    state, result: systemd's words, such as "failed" and "exit-code".
    """

    name: str
    state: str
    result: str
    status: int
    restarts: int


class MachineFacts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of a machine; an absent fact is unknown.

    Attributes:
        board: name that the board gives itself: the device tree's model, or the DMI product.
        board_name: name of this board for `--board`.
        module: part number of a Jetson's module, such as "p3767-0005".
        soc: NVIDIA's system on a chip, such as "tegra234".
        tegra: whether programs, files or the kernel are those of NVIDIA's Linux for Tegra.
        l4t: release of NVIDIA's Linux for Tegra, such as "36.4.3".
        release_file: whether NVIDIA's release file, with the release of L4T, is there.
        jetpack: release of JetPack; "6.x" if only its line is known.
        jetpack_package: version of the package nvidia-jetpack; "" if it is not installed.
        system: name of the Linux distribution.
        kernel: release of the kernel.
        machine: architecture, such as "aarch64".
        container: kind of container or subsystem, such as "docker" or "wsl".
        cpu: model of the first core.
        cpus: number of CPUs that this process may use.
        cpus_online: CPUs that the kernel uses, such as "0-3".
        cpus_present: CPUs that the machine has.
        cpu_quota: number of CPUs that the control groups grant.
        memory_bytes: memory that the kernel manages.
        available_bytes: memory that programs can still get.
        swap_bytes: swap, zram included.
        zram_bytes: swap that is compressed memory.
        disks: file systems that we write to.
        power_mode: name of nvpmodel's mode.
        power_modes: name of each mode → its number.
        governor: frequency governor of the CPUs.
        cpu_khz: lowest and highest frequency that is allowed now, and the highest there is.
        gpu_hz: the same of a Jetson's GPU.
        temperatures: °C by sensor.
        throttles_at: °C from which the kernel slows the machine down, by sensor.
        throttled: reasons for which the machine is slower now.
        gpus: names of NVIDIA's GPUs.
        cards: number of NVIDIA's cards on the PCI bus.
        gpu_devices: device nodes of GPUs.
        gpu_memory_bytes: memory of the first GPU, unless it is the machine's.
        compute: compute capability of the first GPU, such as "8.7".
        driver: version of NVIDIA's driver.
        driver_cuda: newest version of CUDA that the driver supports.
        gpu_problem: what NVIDIA's tools said of a GPU that does not work.
        mig: whether the first GPU is divided into instances (MIG).
        cuda: version of the CUDA runtime.
        cuda_problem: why CUDA cannot be used.
        tensorrt: version of TensorRT that this Python imports.
        tensorrt_libraries: version of TensorRT's libraries in the system.
        tensorrt_problem: why TensorRT cannot be imported although it is there.
        onnxruntime: version of ONNX Runtime.
        onnxruntime_providers: the providers it was built with.
        onnxruntime_problem: why it cannot be imported although it is there.
        packages: versions of the installed wheels that matter here.
        absent: provider → reason why its libraries or its hardware are missing; "" if they are
            there.
        python: version of the Python that runs Pilotfish.
        system_python: version of the system's Python.
        pilotfish: version of Pilotfish.
        systemd: version of systemd.
        units: our units that are installed.
        time: the machine's clock, ISO 8601, UTC.
        clock_behind: a file of this installation is newer than the clock.
        battery_clock: the clock that runs without power, as systemd shows it.
        time_synchronised: whether the clock follows time servers.
        encoding: encoding of texts by the locale.
        open_files: limit of open files, and the limit to which it may be raised.
        huge_pages: the kernel's setting of transparent huge pages.
        unfinished: commands that did not end in time.
        unread: what this user may not read.
    """

    board: str | None = None
    board_name: str | None = None
    module: str | None = None
    soc: str | None = None
    tegra: bool = False
    l4t: str | None = None
    release_file: bool | None = None
    jetpack: str | None = None
    jetpack_package: str | None = None
    system: str | None = None
    kernel: str | None = None
    machine: str | None = None
    container: str | None = None
    cpu: str | None = None
    cpus: int | None = None
    cpus_online: str | None = None
    cpus_present: str | None = None
    cpu_quota: float | None = None
    memory_bytes: int | None = None
    available_bytes: int | None = None
    swap_bytes: int | None = None
    zram_bytes: int | None = None
    disks: tuple[Disk, ...] = ()
    power_mode: str | None = None
    power_modes: dict[str, int] = {}
    governor: str | None = None
    cpu_khz: tuple[int, int, int] | None = None
    gpu_hz: tuple[int, int, int] | None = None
    temperatures: dict[str, float] = {}
    throttles_at: dict[str, float] = {}
    throttled: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    cards: int | None = None
    gpu_devices: tuple[str, ...] = ()
    gpu_memory_bytes: int | None = None
    compute: str | None = None
    driver: str | None = None
    driver_cuda: str | None = None
    gpu_problem: str | None = None
    mig: bool | None = None
    cuda: str | None = None
    cuda_problem: str | None = None
    tensorrt: str | None = None
    tensorrt_libraries: str | None = None
    tensorrt_problem: str | None = None
    onnxruntime: str | None = None
    onnxruntime_providers: tuple[str, ...] | None = None
    onnxruntime_problem: str | None = None
    packages: dict[str, str] | None = None
    absent: dict[str, str] | None = None
    python: str | None = None
    system_python: str | None = None
    pilotfish: str | None = None
    systemd: str | None = None
    units: tuple[Unit, ...] = ()
    time: str | None = None
    clock_behind: bool | None = None
    battery_clock: str | None = None
    time_synchronised: bool | None = None
    encoding: str | None = None
    open_files: tuple[int, int] | None = None
    huge_pages: str | None = None
    unfinished: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def is_tegra(self) -> bool:
        """Whether this is a Jetson, or a container on it."""
        return self.tegra or self.soc is not None or self.l4t is not None

    @property
    def jetpack_line(self) -> int:
        """The first number of JetPack's version; 0: unknown."""
        line = (self.jetpack or "").partition(".")[0]
        return int(line) if line.isdigit() else 0

    @property
    def has_gpu(self) -> bool:
        """Whether NVIDIA's GPU is there, whether or not it works."""
        if self.is_tegra or self.gpus or self.gpu_devices or self.cards:
            return True
        says_so = "not found" not in (self.gpu_problem or "not found")
        return self.cards != 0 and (says_so or self.driver is not None)
