// What the environment asks to pretend, and the two ways to speak: a log, and a last word.
#include <fcntl.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "driver.h"

extern char** environ;
extern "C" void emulator_configure(int order, uint64_t seed, int poison);

namespace standin {

void fail(const char* format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    fprintf(stderr, "stand-in driver: %s\n", text);
    abort();
}

// A line a write, so that lines of several threads and processes stay whole.
void note(const char* format, ...) {
    static const int file =
        settings().log ? open(settings().log, O_WRONLY | O_CREAT | O_APPEND, 0644) : -1;
    if (file < 0) return;
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    const int most = int(sizeof(text)) - 1;
    int length = vsnprintf(text, size_t(most), format, arguments);
    va_end(arguments);
    if (length > most - 1) length = most - 1;
    text[length] = '\n';
    if (write(file, text, size_t(length) + 1) < 0) fail("the log can't be written");
}

static long number(const char* name, const char* value) {
    char* end = nullptr;
    const long parsed = strtol(value, &end, 0);
    if (!*value || *end) fail("%s is %s, not a number", name, value);
    return parsed;
}

static int choice(const char* name, const char* value, std::initializer_list<const char*> names) {
    int index = 0;
    for (const char* known : names) {
        if (!strcmp(known, value)) return index;
        index++;
    }
    fail("%s can't be %s", name, value);
}

static void apply(Settings& s, const std::string& knob, const char* value) {
    const char* name = knob.c_str();
    if (knob == "STANDIN_CAPABILITY")
        s.capability = int(number(name, value));
    else if (knob == "STANDIN_DRIVER")
        s.driver = int(number(name, value));
    else if (knob == "STANDIN_DEVICES")
        s.devices = int(number(name, value));
    else if (knob == "STANDIN_MEMORY")
        s.memory = size_t(number(name, value));
    else if (knob == "STANDIN_MEMORY_TAKEN")
        s.memory_taken = size_t(number(name, value));
    else if (knob == "STANDIN_STREAMS")
        s.streams = Streams(choice(name, value, {"eager", "lazy", "hasty"}));
    else if (knob == "STANDIN_FORGETS_WAITS")
        s.forgets_waits = number(name, value) != 0;
    else if (knob == "STANDIN_ORDER")
        s.order = choice(name, value, {"forward", "reverse", "random"});
    else if (knob == "STANDIN_POISON")
        s.poison = int(number(name, value));
    else if (knob == "STANDIN_BREAK_AT")
        s.break_at = number(name, value);
    else if (knob == "STANDIN_LEAKS")
        s.checks_leaks = number(name, value) != 0;
    else if (knob == "STANDIN_ALGORITHMS")
        s.algorithms =
            Algorithms(choice(name, value, {"usual", "varying", "refusing", "absent"}));
    else if (knob == "STANDIN_LOG")
        s.log = value;
    else
        fail("there is no knob %s", name);
}

static Settings read_settings() {
    Settings found;
    for (char** entry = environ; *entry; entry++) {
        const char* equals = strchr(*entry, '=');
        if (!equals || strncmp(*entry, "STANDIN_", 8)) continue;
        apply(found, std::string(*entry, size_t(equals - *entry)), equals + 1);
    }
    emulator_configure(found.order, 1, found.poison);
    return found;
}

const Settings& settings() {
    static const Settings all = read_settings();
    return all;
}

}  // namespace standin
