// What a module's image says of itself: for which devices it is, and its kernels.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace standin {

struct KernelFacts {
    int threads_max = 1024;           // of its launch bounds
    int registers = 0;                // a thread; 0 where the image doesn't say
    int static_shared = 0;            // bytes
    std::vector<int> parameter_bytes;  // empty where the image doesn't say
};

struct Image {
    bool is_ptx = false;
    int architecture = 0;  // 90 for sm_90
    int ptx_version = 0;   // 84 for 8.4
    bool is_new_abi = false;  // of toolkits from 13 on
    std::map<std::string, KernelFacts> kernels;
};

// False for what is neither a cubin nor PTX.
bool read_image(const void* data, Image& image);

}  // namespace standin
