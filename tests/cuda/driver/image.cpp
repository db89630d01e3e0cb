// Reads cubins (ELF files with NVIDIA's sections) and PTX.
#include "image.h"

#include <elf.h>

#include <cstdlib>
#include <cstring>

namespace standin {

static constexpr uint16_t MACHINE_CUDA = 190;
static constexpr uint8_t NEW_ABI = 8;

// A cubin's notes on a kernel (section .nv.info.NAME): how they are laid out, and which we read.
static constexpr uint8_t SIZED = 4;  // the value's bytes follow
static constexpr uint8_t MAX_THREADS = 0x05, PARAMETER = 0x17;

static bool starts_with(const std::string& text, const char* head) {
    return text.compare(0, strlen(head), head) == 0;
}

static void read_notes(const char* at, size_t bytes, KernelFacts& kernel) {
    for (const char* end = at + bytes; at + 4 <= end;) {
        const uint8_t format = uint8_t(at[0]), what = uint8_t(at[1]);
        uint16_t size;
        memcpy(&size, at + 2, 2);
        at += 4;
        if (format != SIZED) continue;
        uint32_t words[3] = {};
        memcpy(words, at, size < sizeof(words) ? size : sizeof(words));
        if (what == MAX_THREADS) kernel.threads_max = int(words[0] * words[1] * words[2]);
        if (what == PARAMETER) {  // index; number, offset; flags and the size
            const size_t number = words[1] & 0xffff;
            if (kernel.parameter_bytes.size() <= number)
                kernel.parameter_bytes.resize(number + 1);
            kernel.parameter_bytes[number] = int(words[2] >> 18);
        }
        at += size;
    }
}

static bool read_cubin(const char* data, Image& image) {
    Elf64_Ehdr header;
    memcpy(&header, data, sizeof(header));
    if (header.e_machine != MACHINE_CUDA) return false;
    image.is_new_abi = header.e_ident[EI_ABIVERSION] >= NEW_ABI;
    image.architecture = int(header.e_flags >> (image.is_new_abi ? 8 : 0) & 0xff);
    std::vector<Elf64_Shdr> sections(header.e_shnum);
    memcpy(sections.data(), data + header.e_shoff, sections.size() * sizeof(Elf64_Shdr));
    const char* names = data + sections[header.e_shstrndx].sh_offset;
    for (const Elf64_Shdr& section : sections) {
        const std::string name = names + section.sh_name;
        if (starts_with(name, ".text."))
            image.kernels[name.substr(6)].registers = int(section.sh_info >> 24);
        if (starts_with(name, ".nv.shared."))
            image.kernels[name.substr(11)].static_shared = int(section.sh_size);
        if (starts_with(name, ".nv.info."))
            read_notes(data + section.sh_offset, section.sh_size, image.kernels[name.substr(9)]);
    }
    return true;
}

static bool read_ptx(const char* text, Image& image) {
    const char* version = strstr(text, ".version ");
    const char* target = strstr(text, ".target sm_");
    if (!version || !target) return false;
    char* rest = nullptr;
    const long major = strtol(version + 9, &rest, 10);
    image.is_ptx = true;
    image.ptx_version = int(major * 10 + strtol(rest + 1, nullptr, 10));
    image.architecture = atoi(target + 11);
    for (const char* at = text; (at = strstr(at, ".entry ")) != nullptr;) {
        at += 7;
        KernelFacts& kernel = image.kernels[std::string(at, strcspn(at, "( \n"))];
        const char* body = strchr(at, '{');
        const char* bound = strstr(at, ".maxntid ");
        if (bound && body && bound < body) kernel.threads_max = atoi(bound + 9);
    }
    return true;
}

bool read_image(const void* data, Image& image) {
    const char* bytes = static_cast<const char*>(data);
    if (!memcmp(bytes, ELFMAG, SELFMAG)) return read_cubin(bytes, image);
    return read_ptx(bytes, image);
}

}  // namespace standin
