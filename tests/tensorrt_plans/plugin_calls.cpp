// Calls the plugin library as TensorRT does, without TensorRT: reads fields, asks for its workspace, launches once.
//     plugin_calls LIBRARY
// With -DDRIVER this file is the driver instead: it prints what it is asked for. SEKO_ARCH is its GPU, as 89.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#ifdef DRIVER

extern "C" {
int cuCtxGetDevice(int* device) {
    *device = 0;
    return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
    int const arch = std::atoi(std::getenv("SEKO_ARCH"));
    *value = attribute == 75 ? arch / 10 : arch % 10;
    return 0;
}
int cuModuleLoadData(void** module, void const* image) {
    std::printf("load %s\n", static_cast<char const*>(image));
    *module = module;
    return 0;
}
int cuModuleUnload(void*) { return 0; }
int cuModuleGetFunction(void** function, void*, char const* name) {
    std::printf("function %s\n", name);
    *function = function;
    return 0;
}
int cuFuncSetAttribute(void*, int attribute, int value) {
    std::printf("attribute %d %d\n", attribute, value);
    return 0;
}
// The kernel of `main` below: two pointers, two integers, a pointer and, on sm_120, scratch memory.
int cuLaunchKernel(void*, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared,
    void* stream, void** given, void**) {
    std::printf("grid %u %u %u block %u %u %u shared %u stream %zx\n", x, y, z, bx, by, bz, shared,
        reinterpret_cast<size_t>(stream));
    for (int i = 0; i < (std::atoi(std::getenv("SEKO_ARCH")) == 120 ? 6 : 5); ++i) {
        bool const number = i == 2 || i == 3;
        std::printf("%zx ", number ? static_cast<size_t>(*static_cast<int32_t*>(given[i]))
                                   : reinterpret_cast<size_t>(*static_cast<void**>(given[i])));
    }
    std::printf("\n");
    return 0;
}
}

#else

#include "NvInferRuntime.h"

#include <dlfcn.h>

#include <vector>

using namespace nvinfer1;

struct Logger final : ILogger {
    void log(Severity, char const* text) noexcept override { std::printf("says %s\n", text); }
};

struct Finder final : ILoggerFinder {
    ILogger* findLogger() override { return &logger; }
    Logger logger;
};

int main(int, char** names) {
    void* library = dlopen(names[1], RTLD_NOW);
    auto creators = reinterpret_cast<IPluginCreatorInterface* const* (*)(int32_t&)>(dlsym(library, "getCreators"));
    auto finds = reinterpret_cast<void (*)(ILoggerFinder*)>(dlsym(library, "setLoggerFinder"));
    Finder finder;
    finds(&finder);
    int32_t count = 0;
    auto* creator = static_cast<IPluginCreatorV3One*>(creators(count)[0]);
    std::printf("%d %s %s %s\n", count, creator->getPluginNamespace(), creator->getPluginName(),
        creator->getPluginVersion());

    char const entry[] = "kernel", ptx[] = "older\fnewer";
    std::vector<std::pair<char const*, std::vector<int32_t>>> const lists{{"archs", {89, 120}},
        {"shared", {1000, 50000}}, {"scratch", {0, 768}}, {"launch", {2, 3, 5, 64}}, {"scalars", {2, 7, 9}},
        {"inputs", {2}}, {"dtypes", {0, 0, 0}}, {"aliases", {1}}, {"shapes", {1, 4}}};
    std::vector<PluginField> fields{{"entry", entry, PluginFieldType::kCHAR, sizeof(entry) - 1},
        {"ptx", ptx, PluginFieldType::kCHAR, sizeof(ptx) - 1}};
    for (auto const& [name, numbers] : lists) {
        fields.emplace_back(name, numbers.data(), PluginFieldType::kINT32, static_cast<int32_t>(numbers.size()));
    }
    PluginFieldCollection given{static_cast<int32_t>(fields.size()), fields.data()};
    IPluginV3* plugin = creator->createPlugin("one", &given, TensorRTPhase::kBUILD);
    if (plugin == nullptr) {
        return 1;
    }
    auto* build = static_cast<IPluginV3OneBuildV2*>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD));
    std::printf("workspace %zu alias %d\n", build->getWorkspaceSize(nullptr, 0, nullptr, 0), build->getAliasedInput(0));

    // As in a plan: what is serialised makes the plugin anew, which is attached to a context.
    auto* told = static_cast<IPluginV3OneRuntime*>(plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME))
                     ->getFieldsToSerialize();
    IPluginV3* read = creator->createPlugin("two", told, TensorRTPhase::kRUNTIME);
    auto* runtime = static_cast<IPluginV3OneRuntime*>(read->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
    IPluginV3* attached = runtime->attachToContext(nullptr);
    runtime = static_cast<IPluginV3OneRuntime*>(attached->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
    auto at = [](size_t place) { return reinterpret_cast<void*>(place); };
    void const* inputs[] = {at(0x1000), at(0x2000)};
    void* outputs[] = {at(0x3000)};
    int const failed = runtime->enqueue(
        nullptr, nullptr, inputs, outputs, at(0x4000), reinterpret_cast<cudaStream_t>(at(0x5000)));
    std::printf("failed %d\n", failed);
    delete attached;
    delete read;
    delete plugin;
    return 0;
}

#endif
