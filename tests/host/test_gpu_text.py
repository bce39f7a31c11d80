"""What nvidia-smi prints, in the forms that drivers have had, and what it prints where something is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertune.host import gpus as gpu_text
from clustertune.host.gpus import driver, module_version, topology
from clustertune.host.probe import ABSENT, CommandOutput, Probe

GPU = """
 <gpu id="00000000:18:00.0">
  <product_name>NVIDIA H100 80GB HBM3</product_name>
  <persistence_mode>Enabled</persistence_mode>
  <mig_mode><current_mig>Disabled</current_mig><pending_mig>Disabled</pending_mig></mig_mode>
  <uuid>GPU-00000000-1111-2222-3333-444444444444</uuid>
  <minor_number>3</minor_number>
  <pci>
   <pci_bus_id>00000000:18:00.0</pci_bus_id>
   <pci_gpu_link_info>
    <pcie_gen><max_link_gen>5</max_link_gen><current_link_gen>1</current_link_gen>
     <max_device_link_gen>5</max_device_link_gen><max_host_link_gen>N/A</max_host_link_gen></pcie_gen>
    <link_widths><max_link_width>16x</max_link_width><current_link_width>8x</current_link_width></link_widths>
   </pci_gpu_link_info>
  </pci>
  <clocks_event_reasons>
   <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
   <clocks_event_reason_sw_power_cap>Not Active</clocks_event_reason_sw_power_cap>
   <clocks_event_reason_hw_thermal_slowdown>Active</clocks_event_reason_hw_thermal_slowdown>
  </clocks_event_reasons>
  <fb_memory_usage><total>81559 MiB</total><reserved>551 MiB</reserved><used>1203 MiB</used></fb_memory_usage>
  <compute_mode>Exclusive_Process</compute_mode>
  <ecc_mode><current_ecc>Enabled</current_ecc></ecc_mode>
  <ecc_errors>
   <volatile><sram_correctable>9</sram_correctable><sram_uncorrectable_parity>1</sram_uncorrectable_parity>
    <sram_uncorrectable_secded>0</sram_uncorrectable_secded><dram_correctable>7</dram_correctable>
    <dram_uncorrectable>2</dram_uncorrectable></volatile>
   <aggregate><dram_uncorrectable>500</dram_uncorrectable></aggregate>
  </ecc_errors>
  <remapped_rows><remapped_row_corr>0</remapped_row_corr><remapped_row_pending>Yes</remapped_row_pending>
   <remapped_row_failure>No</remapped_row_failure></remapped_rows>
  <processes>
   <process_info><pid>77</pid><type>C</type><process_name>python</process_name><used_memory>600 MiB</used_memory></process_info>
   <process_info><pid>78</pid><type>G</type><process_name>Xorg</process_name></process_info>
   <process_info><pid>79</pid><type>M+C</type><process_name>mps</process_name></process_info>
  </processes>
 </gpu>"""
HEAD = "<?xml version='1.0' ?>\n<!DOCTYPE nvidia_smi_log SYSTEM 'nvsmi_device_v12.dtd'>\n<nvidia_smi_log>"
FULL = f"{HEAD}<driver_version>580.95.05</driver_version><cuda_version>13.0</cuda_version>{GPU}</nvidia_smi_log>"
POOR = (
    "<nvidia_smi_log><driver_version>390.157</driver_version><gpu id='0000:05:00.0'><product_name>Tesla K80</product_name>"
    "<persistence_mode>Disabled</persistence_mode><mig_mode><current_mig>N/A</current_mig></mig_mode><uuid>GPU-1</uuid>"
    "<fb_memory_usage><total>[Unknown Error]</total><used>N/A</used></fb_memory_usage>"
    "<compute_mode>[Not Supported]</compute_mode>"
    "<ecc_mode><current_ecc>N/A</current_ecc></ecc_mode><ecc_errors><volatile><double_bit><total>3</total></double_bit>"
    "</volatile></ecc_errors><clocks_throttle_reasons><clocks_throttle_reason_hw_slowdown>Active"
    "</clocks_throttle_reason_hw_slowdown></clocks_throttle_reasons><processes>N/A</processes></gpu></nvidia_smi_log>"
)
CSV = (
    "0, NVIDIA A100-SXM4-40GB, GPU-a, 00000000:07:00.0, 40960 MiB, 3 MiB\n"
    "1, NVIDIA A100-SXM4-40GB, GPU-b, 00000001:0F:00.0, [N/A], [Not Supported]\n"
    "Unable to determine the device handle for GPU2: 0000:47:00.0: Unknown Error\n"
)
TOPOLOGY = (
    "\x1b[4m\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\t0-47\t0\nGPU1\tNV18\t X \tSYS\t48-95\t1\nNIC0\tPIX\tSYS\t X \n\nLegend:\n\n  X    = Self\n"
)


def test_a_new_driver_is_read_in_full() -> None:
    """Every field of a GPU; idle clocks are no reason, displays no users, corrected errors no errors."""
    version, cuda, (gpu,) = gpu_text.parse_xml(FULL)
    assert (version, cuda) == ("580.95.05", "13.0")
    assert (gpu.index, gpu.name, gpu.bus) == (0, "NVIDIA H100 80GB HBM3", "0000:18:00.0")
    assert (gpu.memory_mib, gpu.used_mib, gpu.pids) == (81559, 1203, [77, 79])
    assert (gpu.compute_mode, gpu.persistence, gpu.mig, gpu.ecc) == ("Exclusive_Process", True, False, True)
    assert (gpu.ecc_uncorrected, gpu.remap_pending, gpu.remap_failed) == (3, True, False)
    assert (gpu.pcie_gen, gpu.pcie_gen_max, gpu.pcie_width, gpu.pcie_width_max) == (5, 5, 8, 16)
    assert gpu.throttle == ["hw_thermal_slowdown"]


def test_an_old_driver_and_a_consumer_card_lack_much() -> None:
    """N/A, [Not Supported] and the like are None, never 0 or False."""
    version, cuda, (gpu,) = gpu_text.parse_xml(POOR)
    assert (version, cuda, gpu.bus) == ("390.157", "", "0000:05:00.0")
    assert (gpu.memory_mib, gpu.used_mib, gpu.pids, gpu.mig, gpu.ecc) == (None, None, None, None, None)
    assert (gpu.compute_mode, gpu.persistence, gpu.ecc_uncorrected, gpu.throttle) == ("", False, 3, ["hw_slowdown"])
    assert (gpu.pcie_gen, gpu.pcie_width, gpu.remap_pending) == (None, None, None)


@pytest.mark.parametrize("text", ["", "No devices were found", "<nvidia_smi_log><gpu>", "<html/>x", FULL[:500]])
def test_what_is_no_answer_is_refused(text: str) -> None:
    """Half an answer of a driver that was killed."""
    with pytest.raises(ValueError, match="no answer"):
        gpu_text.parse_xml(text)


def test_complaints_in_front_of_the_answer_are_passed_over() -> None:
    """A driver that has lost one GPU complains on the same stream, and tells of the others."""
    assert len(gpu_text.parse_xml(f"Unable to determine the device handle for GPU1: Unknown Error\n{FULL}")[2]) == 1


def test_pci_addresses_are_the_kernels() -> None:
    """nvidia-smi writes the domain with eight digits, /sys with four, or five behind a VMD."""
    found = [gpu_text.bus_address(f"{domain}1:00.0") for domain in ("00000000:C", "0000:c", "00010000:0", "C")]
    assert found == ["0000:c1:00.0", "0000:c1:00.0", "10000:01:00.0", "0000:c1:00.0"]
    assert gpu_text.bus_address("N/A") == gpu_text.bus_address("") == ""


def test_the_short_answer() -> None:
    """Lines that are not GPUs are skipped."""
    first, second = gpu_text.parse_csv(CSV)
    assert (first.index, first.name, first.bus) == (0, "NVIDIA A100-SXM4-40GB", "0000:07:00.0")
    assert (first.memory_mib, first.used_mib) == (40960, 3)
    assert (second.bus, second.memory_mib, second.used_mib) == ("0001:0f:00.0", None, None)


def test_the_map_of_links() -> None:
    """With the escapes that newer drivers print, and with adapters among the columns."""
    assert gpu_text.gpu_links(TOPOLOGY) == {(0, 1): "NV18", (1, 0): "NV18"}
    assert gpu_text.gpu_links("") == {} == gpu_text.gpu_links("GPU0 X")


def test_the_kernel_modules_version() -> None:
    """Both kinds of kernel modules."""
    old = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023"
    new = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs)"
    assert [module_version(text) for text in (old, new, "")] == ["535.104.05", "580.65.06", ""]


# --- asking ------------------------------------------------------------------------------------------------------------


def probe(**answers: CommandOutput) -> tuple[Probe, list[str]]:
    """A machine whose nvidia-smi answers by the first option; and what was asked."""
    calls: list[str] = []

    def ask(command: object, seconds: float) -> CommandOutput:
        words = list(command)  # type: ignore[call-overload]
        calls.append(words[1])
        assert seconds > 0
        return answers.get(words[1].strip("-").partition("=")[0].replace("-", "_"), ABSENT)

    return Probe(Path("/nonexistent"), ask), calls


def test_a_machine_without_the_program_has_no_fault() -> None:
    """A login node."""
    assert driver(probe()[0]) == {} == topology(probe()[0])


def test_a_driver_that_fails_says_why_and_what_it_still_knows() -> None:
    """The short question may be answered where the long one is not."""
    one, calls = probe(q=CommandOutput("", "Unable to determine the device handle for GPU2"), query_gpu=CommandOutput(CSV))
    found = driver(one)
    assert found["nvidia_smi"].startswith("Unable") and [gpu.index for gpu in found["gpus"]] == [0, 1]
    assert calls == ["-q", f"--query-gpu={gpu_text.CSV_QUERY}"]


def test_a_driver_that_hangs_is_asked_once() -> None:
    """The second question would hang as well."""
    one, calls = probe(q=CommandOutput("", "no answer within 45 s"), query_gpu=CommandOutput(CSV))
    assert driver(one) == {"nvidia_smi": "no answer within 45 s"} and calls == ["-q"]
