"""Power and energy of a rank's GPUs, through a double of NVML and from recordings."""

import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_patches.power.devices import RankGpus, UnknownGpusError, rank_devices
from engine_patches.power.nvml import RETRY_S, Notices, NvmlSource, open_source
from engine_patches.power.source import UNKNOWN, EnergySum, PowerReading
from tests.support.nvml import FakeNvml, Gpu, Mig
from tests.support.power_recording import Recording, Sample


def two() -> FakeNvml:
    return FakeNvml([Gpu("GPU-a"), Gpu("GPU-b", 200_500, 7_000_000)])


def source(nvml: FakeNvml, *devices: str) -> NvmlSource:
    return NvmlSource(devices, load=lambda: nvml)


def test_power_and_energy_are_sums_in_watts_and_joules() -> None:
    nvml = two()
    read = source(nvml, "0", "GPU-b").read
    assert read(0.0) == PowerReading(500.5, 0.0)
    nvml.gpus[0].energy_mj, nvml.gpus[1].energy_mj = 5_001_500, 7_000_500
    nvml.gpus[0].power_mw = 100_000
    assert read(1.0) == PowerReading(300.5, 2.0)


@pytest.mark.parametrize("counter", [None, "NoPermission"])
def test_without_a_counter_power_is_integrated(counter: str | None) -> None:
    nvml = FakeNvml([Gpu("GPU-a", energy_mj=counter)])
    read = source(nvml, "0").read
    assert read(10.0) == PowerReading(300.0, 0.0)
    nvml.gpus[0].power_mw = 100_000
    assert read(12.0) == PowerReading(100.0, 400.0)


def test_without_a_sensor_of_power_there_is_energy() -> None:
    nvml = FakeNvml([Gpu("GPU-a", power_mw=None)])
    read = source(nvml, "0").read
    read(0.0)
    nvml.gpus[0].energy_mj = 5_000_250
    assert read(1.0) == PowerReading(None, 0.25)


def test_a_counter_that_starts_anew_takes_nothing_away() -> None:
    nvml = FakeNvml([Gpu("GPU-a")])
    read = source(nvml, "0").read
    read(0.0)
    nvml.gpus[0].energy_mj = 10
    assert read(2.0) == PowerReading(300.0, 600.0)
    nvml.gpus[0].energy_mj = 1_010
    assert read(3.0) == PowerReading(300.0, 601.0)


def test_parts_of_one_gpu_count_it_once_and_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
    nvml = two()
    nvml.migs = [Mig("MIG-1", nvml.gpus[0]), Mig("MIG-2", nvml.gpus[0])]
    read = source(nvml, "MIG-1", "MIG-2").read
    assert read(0.0).power_w == 300.0
    nvml.gpus[0].fault = "GpuIsLost"
    read(1.0)
    nvml.gpus[0].fault = None
    assert read(1.0 + RETRY_S).power_w == 300.0
    assert source(nvml, "MIG-1", "GPU-a", "GPU-b").read(0.0).power_w == 500.5
    said = [record.getMessage() for record in caplog.records if "whole" in record.getMessage()]
    assert len(said) == 2
    assert said[0].startswith("evenstep: MIG-1 is part of a GPU: the power told of such parts is")


def test_a_gpu_that_is_lost_is_said_once_and_read_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    nvml = two()
    read = source(nvml, "0", "1").read
    read(0.0)
    nvml.gpus[1].fault = "GpuIsLost"
    assert [read(1.0), read(2.0), read(1.0 + RETRY_S)] == [UNKNOWN] * 3
    nvml.gpus[1].fault = None
    nvml.gpus[0].energy_mj = nvml.gpus[1].energy_mj = 7_001_000
    assert read(RETRY_S) == UNKNOWN
    # The counters have gone on meanwhile.
    assert read(1.0 + 2 * RETRY_S) == PowerReading(500.5, 2002.0)
    assert [record.getMessage() for record in caplog.records] == [
        "evenstep: power unknown: GPU 1: it is lost: see dmesg for its Xid error, and reset "
        "it; tried again every 30 s",
        "evenstep: power is known again, after: GPU 1: it is lost: see dmesg for its Xid error, "
        "and reset it",
    ]
    assert nvml.starts == 1


def test_what_befalls_all_ranks_of_a_host_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    nvml, notices = two(), Notices()
    ranks = [NvmlSource([gpu], notices, lambda: nvml) for gpu in ("0", "1")]
    for now_s, fault in ((0.0, "DriverNotLoaded"), (RETRY_S, "Unknown"), (2 * RETRY_S, None)):
        nvml.fault = fault
        told = [rank.read(now_s).power_w for rank in ranks]
    assert told == [300.0, 200.5]
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "INFO"]


@pytest.mark.parametrize(
    ("nvml", "said"),
    [
        (FakeNvml([], fault="LibraryNotFound"), "there is no NVIDIA driver here: install it, or"),
        (FakeNvml([], fault="DriverNotLoaded"), "the NVIDIA driver is not loaded: see what"),
        (FakeNvml([], fault="Unknown"), "NVML says: double: Unknown"),
        (FakeNvml([]), "GPU 0: there is no such GPU: nvidia-smi -L lists"),
        (
            FakeNvml([Gpu("GPU-a", fault="NoPermission")]),
            "GPU 0: the driver refuses permission: let this user read /dev/nvidia*",
        ),
        (
            FakeNvml([Gpu("GPU-a", "NoPermission")]),
            "GPU 0: the driver refuses permission: let this user read /dev/nvidia*",
        ),
        (FakeNvml([Gpu("GPU-a", None, None)]), "GPU 0 has neither a power sensor nor an"),
        (None, "pynvml is missing: pip install nvidia-ml-py"),
    ],
)
def test_what_is_wrong_is_said_with_the_mend(
    nvml: FakeNvml | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setitem(sys.modules, "vllm.third_party.pynvml", None)
    asked = NvmlSource(["0"])
    assert [asked.read(now_s) for now_s in (0.0, 1.0, RETRY_S, 3 * RETRY_S)] == [UNKNOWN] * 4
    assert asked.cross_check(1, 1) is None
    (record,) = caplog.records
    assert record.getMessage().startswith(f"evenstep: power unknown: {said}")


def test_memory_is_cross_checked_while_the_gpus_can_be_read() -> None:
    asked = source(two(), "0", "1")
    assert asked.cross_check(2**30, 64) is None
    asked.read(0.0)
    enough, line = asked.cross_check(2**30, 64) or (None, "")
    assert enough
    assert line.count("2.00 GiB held by all processes") == 2


@pytest.mark.parametrize(
    ("visible", "gpus", "local_rank", "devices"),
    [
        (None, 2, 0, ("0", "1")),
        (None, 2, 1, ("2", "3")),
        ("4, 5,6,7", 2, 1, ("6", "7")),
        ("GPU-a,GPU-b", 1, 1, ("GPU-b",)),
        ("3", 1, 2, ("3",)),  # each rank sees its own alone
        ("2,3", 2, 1, ("2", "3")),
        ("0,1,-1,2", 1, 1, ("1",)),
        ("MIG-a,GPU-b,", 1, 1, ("GPU-b",)),
    ],
)
def test_a_rank_has_its_share_of_what_is_visible(
    visible: str | None, gpus: int, local_rank: int, devices: tuple[str, ...]
) -> None:
    assert rank_devices(RankGpus(gpus, local_rank), visible) == devices


def test_a_rank_has_its_share_of_the_device_ids() -> None:
    assert rank_devices(RankGpus(2, 1, assigned=[4, 5, 6, 7]), "4,5,6,7") == ("6", "7")
    assert rank_devices(RankGpus(1, 0, assigned=[3]), None) == ("3",)


@pytest.mark.parametrize(
    ("rank", "visible", "said"),
    [
        (RankGpus(16, 0, machines=2), "0,1,2,3,4,5,6,7", "16 GPUs are on 2 machines, and NVML"),
        (RankGpus(16, 0, machines=2), None, "keep a rank on one machine"),
        (RankGpus(16, 0), "0,1,2,3,4,5,6,7", "has 16 of the GPUs, and CUDA_VISIBLE_DEVICES or"),
        (RankGpus(2, 1), "0,1,2", "rank 1 of this machine has 2 of the GPUs"),
        (RankGpus(1, 0), "", "names nothing: leave it out, or name the GPUs"),
        (RankGpus(1, 0), ",", "names nothing"),
        (RankGpus(1, 0), "-1", "names nothing before an entry at which CUDA stops: leave it out"),
        (RankGpus(1, 2), "0,1,-1,2", "names 0, 1 before an entry"),
        (RankGpus(2, 1), "0,1,,2,3", "names 0, 1 before an entry"),
        (RankGpus(1, 1), "0,none,1", "names 0 before an entry"),
        (RankGpus(1, 0), "1,0,1", "names a GPU twice, and CUDA shows none: 1,0,1"),
        (RankGpus(2, 1, assigned=[4]), None, "--device-ids names 4: leave it out"),
        (RankGpus(1, 0, placed_by="the executor ray"), None, "the executor ray has chosen"),
        (RankGpus(1, 0, placed_by="the executor ray"), "", "run evenstep agent on the machine"),
        (RankGpus(2, 0, placed_by="the executor ray"), "0,1", "does not say which"),
    ],
)
def test_a_part_of_a_rank_s_gpus_is_not_taken_for_all(
    rank: RankGpus,
    visible: str | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(UnknownGpusError, match=said):
        rank_devices(rank, visible)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert open_source(rank) is None
    (record,) = caplog.records
    assert record.getMessage().startswith("evenstep: power unknown: ")
    assert said in record.getMessage()


@pytest.mark.parametrize("module", ["pynvml", "vllm.third_party.pynvml"])
def test_the_source_of_a_rank(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    for name in ("vllm", "vllm.third_party", "pynvml"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, module, two())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,GPU-b")
    opened = open_source(RankGpus(1, 1))
    assert opened is not None
    assert opened.read(0.0) == PowerReading(200.5, 0.0)


@pytest.mark.parametrize(
    ("order", "visible", "watts"),
    [
        (None, "1", None),
        ("FASTEST_FIRST", "1", None),
        ("PCI_BUS_ID", "1", 200.5),
        (None, "GPU-b", 200.5),
    ],
)
def test_indices_of_gpus_that_cuda_may_number_otherwise_are_not_read(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    order: str | None,
    visible: str,
    watts: float | None,
) -> None:
    nvml = two()
    nvml.gpus[1].name = "a faster one"
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    if order is not None:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    opened = open_source(RankGpus(1, 0))
    assert opened is not None
    assert opened.read(0.0).power_w == watts
    assert [record.getMessage() for record in caplog.records] == [
        "evenstep: power unknown: the GPUs here are of several kinds, which CUDA numbers by their "
        "speed: set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name GPUs by their UUIDs in "
        "CUDA_VISIBLE_DEVICES; tried again every 30 s"
    ] * (watts is None)


def test_an_abbreviated_uuid_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert source(two(), "GPU-").read(0.0) == UNKNOWN
    assert "nvidia-smi -L lists indices and whole UUIDs" in caplog.text


def test_a_gpu_of_several_ranks_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    nvml, notices = two(), Notices()
    gpus = ("0", "GPU-a", "1", "GPU-a")
    ranks = [NvmlSource([gpu], notices, lambda: nvml) for gpu in gpus]
    for now_s in (0.0, 1.0):
        assert [rank.read(now_s).power_w for rank in ranks] == [300.0, 300.0, 200.5, 300.0]
    (record,) = caplog.records
    assert record.getMessage().startswith("evenstep: GPU GPU-a is in several ranks: each reports")


NUMBERS = st.none() | st.floats(0, 1e6)
READINGS = st.builds(PowerReading, NUMBERS, NUMBERS)


@given(st.lists(st.tuples(st.floats(0, 1e3), READINGS, READINGS)))
def test_energy_never_falls(told: list[tuple[float, PowerReading, PowerReading]]) -> None:
    energy, now_s, highest_j = EnergySum(), 0.0, 0.0
    for after_s, a, b in told:
        now_s += after_s
        reading = energy.add(now_s, {"a": a, "b": b})
        unknown = UNKNOWN in (a, b)
        assert (reading.energy_j is None) == unknown
        if reading.energy_j is not None:
            assert reading.energy_j >= highest_j
            highest_j = reading.energy_j


def ramp(steps: int, device: str = "0") -> list[Sample]:
    """100 W rising by 10 W a second; the counter is what that comes to."""
    return [Sample(1e9 + s, device, 100.0 + 10 * s, 100.0 * s + 5 * s * s) for s in range(steps)]


def play(recording: Recording, time_s: float, nvml: FakeNvml, *, counter: bool) -> None:
    told = recording.at("0", recording.begin_s + time_s)
    assert told.power_w is not None
    assert told.energy_j is not None
    nvml.gpus[0].power_mw = round(told.power_w * 1e3)
    nvml.gpus[0].energy_mj = round(told.energy_j * 1e3) if counter else None


@pytest.mark.parametrize("counter", [True, False])
def test_a_recording_through_nvml_gives_the_counters_energy(counter: bool) -> None:
    recording = Recording(ramp(61))
    nvml = FakeNvml([Gpu("GPU-a")])
    read = source(nvml, "0").read
    for second in range(61):
        play(recording, second, nvml, counter=counter)
        reading = read(float(second))
    assert reading.power_w == 700.0
    assert reading.energy_j is not None
    assert math.isclose(reading.energy_j, 24_000.0, abs_tol=1e-3)
