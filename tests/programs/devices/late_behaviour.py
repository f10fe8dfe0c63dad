"""What the accelerator of ``kit.device`` promises, asked of it by name. Prints a row for each name: what was seen, as JSON."""

import contextlib
import ctypes
import json
import multiprocessing
import signal
import threading

import torch

from kit import device

late = device.load()
DEVICE = torch.device("late", 0)


def nothing_is_done_before_somebody_waits():
    numbers = torch.zeros(4, device=DEVICE)
    torch.accelerator.synchronize()
    for _ in range(3):
        numbers.add_(1)
    queued = late.waiting()
    return [queued, numbers.tolist(), late.waiting()]


def other_streams_go_on_by_themselves_only():
    numbers = torch.zeros(4, device=DEVICE)
    torch.accelerator.synchronize()
    side, copied = torch.Stream(device=DEVICE), torch.empty(4, device=DEVICE)
    numbers.add_(1)
    with side:
        copied.copy_(numbers)  # it waits for nobody
    side.synchronize()
    early = late.waiting()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        copied.copy_(numbers)
    before = copied.tolist()
    side.synchronize()
    return [early, before, copied.tolist()]


def an_event_is_what_was_queued_before_it():
    numbers = torch.zeros(2, device=DEVICE)
    torch.accelerator.synchronize()
    numbers.add_(1)
    event = torch.accelerator.current_stream().record_event()
    numbers.add_(1)
    event.synchronize()
    return [late.waiting(), event.query()]


def memory_is_used_again_at_once():
    first = torch.full((300,), 1.0, device=DEVICE)
    side = torch.Stream(device=DEVICE)
    kept = torch.empty(300, device=DEVICE)
    torch.accelerator.synchronize()
    place = first.data_ptr()
    with side:
        kept.copy_(first)
    del first
    second = torch.full((300,), 2.0, device=DEVICE)
    torch.accelerator.synchronize()
    return [second.data_ptr() == place, kept[0].item()]


def recorded_memory_is_not():
    first = torch.full((400,), 1.0, device=DEVICE)
    side = torch.Stream(device=DEVICE)
    kept = torch.empty(400, device=DEVICE)
    torch.accelerator.synchronize()
    place = first.data_ptr()
    with side:
        kept.copy_(first)
    first.record_stream(side)
    del first
    second = torch.full((400,), 2.0, device=DEVICE)
    torch.accelerator.synchronize()
    del second
    third = torch.full((400,), 3.0, device=DEVICE)
    return [kept[0].item(), third.data_ptr() == place or torch.empty(400, device=DEVICE).data_ptr() == place]


def freed_memory_is_overwritten():
    freed = torch.zeros(500, dtype=torch.uint8, device=DEVICE)
    del freed
    return torch.empty(500, dtype=torch.uint8, device=DEVICE)[:2].tolist()


def copies_to_pinned_memory_are_late():
    numbers = torch.ones(4, device=DEVICE)
    pinned, pageable = torch.zeros(4).pin_memory(), torch.zeros(4)
    torch.accelerator.synchronize()
    pinned.copy_(numbers, non_blocking=True)
    pageable.copy_(numbers, non_blocking=True)  # CUDA's waits; and for the one before, which is on the same stream
    blocking = [pinned.tolist(), pageable.tolist()]
    late.behave(pageable_is_late=True)
    pageable.zero_().copy_(numbers * 2, non_blocking=True)
    then = pageable.tolist()
    pinned.copy_(numbers * 3, non_blocking=True)
    still = pinned.tolist()
    torch.accelerator.synchronize()
    late.behave()
    return [blocking, then, still, pageable.tolist(), pinned.tolist(), [pinned.is_pinned(), pageable.is_pinned()]]


def memory_is_registered_by_address():
    host = torch.zeros(4)
    before = late.cudart().cudaHostRegister(host.data_ptr(), 16, 0), host.is_pinned()
    late.cudart().cudaHostUnregister(host.data_ptr())
    late.behave(refuses_registration=True)
    refused = late.cudart().cudaHostRegister(host.data_ptr(), 16, 0), host.is_pinned()
    late.behave()
    return [before, refused]


def a_thread_stands_on_device_0():
    torch.accelerator.set_device_index(2)
    seen = []
    with torch.Stream(device="late:2"):
        thread = threading.Thread(
            target=lambda: seen.extend((torch.accelerator.current_device_index(), late.current_stream(2).stream_id))
        )
        thread.start()
        thread.join()
        here = torch.accelerator.current_device_index(), late.current_stream(2).stream_id > 0
    torch.accelerator.set_device_index(0)
    return [seen, here]


def the_host_dies_of_device_memory():
    numbers = torch.ones(4, device=DEVICE)
    reader = multiprocessing.get_context("fork").Process(target=ctypes.string_at, args=(numbers.data_ptr(), 4))
    reader.start()
    reader.join()
    return reader.exitcode == -signal.SIGSEGV


def devices_are_not_mixed():
    try:
        torch.ones(2, device="late:0") + torch.ones(2, device="late:1")
    except RuntimeError as error:
        return "devices" in str(error)
    return False


def failures_come_on_demand():
    late.fail(allocations=1)
    told = []
    with contextlib.suppress(torch.OutOfMemoryError):
        torch.empty(7000, device=DEVICE)
        told.append("one")
        torch.empty(7000, device=DEVICE)
        told.append("two")
    late.fail(operations=0)
    numbers = torch.ones(3, device=DEVICE)
    for call in (lambda: numbers.add_(1), numbers.tolist, numbers.tolist):
        try:
            call()
            told.append("queued")
        except torch.AcceleratorError:
            told.append("failed")
    late.forget_error()
    late.fail()
    return [*told, torch.ones(1, device=DEVICE).item()]


def the_generator_is_each_devices_own():
    torch.manual_seed(7)
    ours = torch.rand(3, device="late:1")
    state = late.get_rng_state(1)
    one = torch.rand(3, device="late:1")
    late.set_rng_state(state, 1)
    again = torch.rand(3, device="late:1")
    torch.manual_seed(7)
    return [ours.cpu().equal(torch.rand(3)), one.cpu().equal(again.cpu())]


def the_scheduler_lets_steps_go_on():
    numbers = torch.zeros(4, device=DEVICE)
    torch.accelerator.synchronize()
    left = []
    for seed in (1, 1, 2):
        for number in range(3):
            torch.accelerator.synchronize(number)
        late.behave(seed=seed, chance_percent=50)
        for _ in range(20):
            numbers.add_(1)
        left.append(late.waiting())
    late.behave()
    return [left[0] == left[1], 0 < left[2] < 20]


CHECKS = [
    nothing_is_done_before_somebody_waits,
    other_streams_go_on_by_themselves_only,
    an_event_is_what_was_queued_before_it,
    memory_is_used_again_at_once,
    recorded_memory_is_not,
    freed_memory_is_overwritten,
    copies_to_pinned_memory_are_late,
    memory_is_registered_by_address,
    a_thread_stands_on_device_0,
    the_host_dies_of_device_memory,
    devices_are_not_mixed,
    failures_come_on_demand,
    the_generator_is_each_devices_own,
    the_scheduler_lets_steps_go_on,
]

for check in CHECKS:
    torch.accelerator.synchronize()
    print(json.dumps([check.__name__, check()]), flush=True)
