// Streams and events. Eager: work is done when it is submitted, as early as a device could. Lazy:
// it is done when somebody waits for it, as late as a device could, and streams that are not told
// of each other run in the wrong order. Hasty: lazy, but what goes up goes as early as a device
// could, over whatever waits to be read there.
#include <ctime>

#include "driver.h"

namespace standin {

static Handles<Stream> streams("stream");
static Handles<Event> events("event");

std::shared_ptr<Stream> stream_of(const void* handle, const Device& device) {
    if (!handle) fail("the default stream orders itself with others; use a stream of your own");
    const std::shared_ptr<Stream> stream = streams.find(handle);
    if (stream->device != &device)
        fail("a stream of device %d is used on device %d", stream->device->ordinal,
             device.ordinal);
    return stream;
}

// Does the oldest work; what it waits for comes first.
static void step(Stream& stream) {
    if (stream.is_running) fail("streams wait for each other in a circle");
    stream.is_running = true;
    const std::function<void()> work = std::move(stream.waiting.front());
    stream.waiting.pop_front();
    if (!is_broken) work();
    stream.is_running = false;
}

void finish(Stream& stream) {
    while (!stream.waiting.empty()) step(stream);
}

void finish_all(const Device& device) {
    streams.for_each([&](Stream& stream) {
        if (stream.device == &device) finish(stream);
    });
}

void submit(const std::shared_ptr<Stream>& stream, std::function<void()> work) {
    if (is_broken) return;
    stream->waiting.push_back(std::move(work));
    if (settings().streams == Streams::Eager) finish(*stream);
}

size_t streams_and_events_of(const Device& device) {
    return streams.count_of(device) + events.count_of(device);
}

static double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return double(t.tv_sec) * 1e3 + double(t.tv_nsec) * 1e-6;
}

// Until the record is reached: its stream does what comes before it.
static void pass(const std::shared_ptr<Record>& record) {
    if (!record) return;  // an event that was never recorded holds nobody up
    while (!record->is_reached && !record->stream->waiting.empty()) step(*record->stream);
}

static int status() { return is_broken ? LAUNCH_FAILED : SUCCESS; }

}  // namespace standin

using namespace standin;

DRIVER_FUNCTION cuStreamCreate(void** handle, unsigned flags) {
    return in_context([&](Device& device) -> int {
        if (flags > 1) return INVALID_VALUE;
        static int made = 0;
        auto stream = std::make_shared<Stream>();
        stream->device = &device;
        stream->number = made++;
        *handle = streams.add(stream);
        return SUCCESS;
    });
}

DRIVER_FUNCTION cuStreamCreateWithPriority(void** handle, unsigned flags, int) {
    return cuStreamCreate(handle, flags);
}

DRIVER_FUNCTION cuStreamDestroy_v2(void* handle) {
    return in_context([&](Device&) {
        finish(*streams.take(handle));
        return SUCCESS;
    });
}

DRIVER_FUNCTION cuStreamSynchronize(void* handle) {
    return in_context([&](Device& device) {
        note("synchronise stream");
        finish(*stream_of(handle, device));
        return status();
    });
}

DRIVER_FUNCTION cuStreamQuery(void* handle) {
    return in_context([&](Device& device) {
        return stream_of(handle, device)->waiting.empty() ? SUCCESS : NOT_READY;
    });
}

DRIVER_FUNCTION cuEventCreate(void** handle, unsigned) {
    return in_context([&](Device& device) {
        auto event = std::make_shared<Event>();
        event->device = &device;
        *handle = events.add(event);
        return SUCCESS;
    });
}

DRIVER_FUNCTION cuEventDestroy_v2(void* handle) {
    return in_context([&](Device&) {
        events.take(handle);
        return SUCCESS;
    });
}

DRIVER_FUNCTION cuEventRecord(void* handle, void* stream) {
    return in_context([&](Device& device) {
        const auto record = std::make_shared<Record>();
        record->stream = stream_of(stream, device);
        events.find(handle)->last = record;
        submit(record->stream, [record] {
            record->is_reached = true;
            record->milliseconds = now();
        });
        return SUCCESS;
    });
}

DRIVER_FUNCTION cuEventSynchronize(void* handle) {
    return in_context([&](Device&) {
        note("synchronise event");
        pass(events.find(handle)->last);
        return status();
    });
}

DRIVER_FUNCTION cuEventQuery(void* handle) {
    return in_context([&](Device&) {
        const std::shared_ptr<Record> record = events.find(handle)->last;
        return !record || record->is_reached ? SUCCESS : NOT_READY;
    });
}

DRIVER_FUNCTION cuEventElapsedTime(float* milliseconds, void* from, void* to) {
    return in_context([&](Device&) -> int {
        const std::shared_ptr<Record> start = events.find(from)->last, end = events.find(to)->last;
        if (!start || !end) return INVALID_VALUE;
        if (!start->is_reached || !end->is_reached) return NOT_READY;
        *milliseconds = float(end->milliseconds - start->milliseconds);
        return SUCCESS;
    });
}

DRIVER_FUNCTION cuEventElapsedTime_v2(float* milliseconds, void* from, void* to) {
    if (settings().driver < 12080)
        fail("a driver %d has no cuEventElapsedTime_v2", settings().driver);
    return cuEventElapsedTime(milliseconds, from, to);
}

DRIVER_FUNCTION cuStreamWaitEvent(void* handle, void* event, unsigned) {
    return in_context([&](Device& device) {
        const std::shared_ptr<Record> record = events.find(event)->last;
        const std::shared_ptr<Stream> stream = stream_of(handle, device);
        if (!settings().forgets_waits) submit(stream, [record] { pass(record); });
        return SUCCESS;
    });
}
