// One TensorRT plugin for every kernel that is PTX. What it launches, and how, are fields that are serialised into the
// plan; the library holds no kernel. It links neither TensorRT nor CUDA: the driver is opened when a plan first runs.
//
// A kernel takes the inputs' pointers, then int32 scalars, then the outputs' pointers, then scratch memory where it has
// some. Every shape is a number.
//
// Fields:
//   entry    name of the kernel
//   ptx      one text a GPU, a form feed between two
//   archs    the GPU of each text, as 89
//   shared   dynamic shared memory of each, bytes
//   scratch  global scratch memory of each, bytes a block; 0: its kernel takes no such pointer
//   launch   grid along x, y and z, threads of a block
//   scalars  how many there are, then they
//   inputs   how many there are
//   dtypes   of the inputs, then of the outputs, as nvinfer1::DataType counts them
//   aliases  for each output the input whose memory it is, or -1
//   shapes   for each output its rank, then its sizes
#include "NvInferRuntime.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

using namespace nvinfer1;

namespace {

constexpr char const* kNAME = "PtxKernel";
constexpr char const* kVERSION = "2";
constexpr char const* kNAMESPACE = "seko";
constexpr int kSHARED_WITHOUT_ASKING = 48 * 1024;
// Numbers of cuda.h.
constexpr int kMAX_DYNAMIC_SHARED = 8;
constexpr int kMAJOR = 75, kMINOR = 76;
constexpr int kFIRST_FOR_ITSELF = 90;

using Ints = std::vector<int32_t>;
using Module = void*;
using Function = void*;

ILoggerFinder* loggers = nullptr;

void complain(std::string const& text) {
    ILogger* logger = loggers == nullptr ? nullptr : loggers->findLogger();
    if (logger != nullptr) {
        logger->log(ILogger::Severity::kERROR, text.c_str());
    }
}

struct Driver {
    int (*currentDevice)(int*) = nullptr;
    int (*deviceAttribute)(int*, int, int) = nullptr;
    int (*loadModule)(Module*, void const*) = nullptr;
    int (*unloadModule)(Module) = nullptr;
    int (*getFunction)(Function*, Module, char const*) = nullptr;
    int (*setAttribute)(Function, int, int) = nullptr;
    int (*launch)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
        void**) = nullptr;
    bool there = false;

    Driver() {
        void* library = dlopen("libcuda.so.1", RTLD_NOW);
        there = library != nullptr && find(library, "cuCtxGetDevice", currentDevice)
            && find(library, "cuDeviceGetAttribute", deviceAttribute) && find(library, "cuModuleLoadData", loadModule)
            && find(library, "cuModuleUnload", unloadModule) && find(library, "cuModuleGetFunction", getFunction)
            && find(library, "cuFuncSetAttribute", setAttribute) && find(library, "cuLaunchKernel", launch);
    }

    template <typename T>
    static bool find(void* library, char const* name, T& entry) {
        entry = reinterpret_cast<T>(dlsym(library, name));
        return entry != nullptr;
    }
};

Driver const& driver() {
    static Driver const one;
    return one;
}

class PtxKernel final : public IPluginV3,
                        public IPluginV3OneCore,
                        public IPluginV3OneBuildV2,
                        public IPluginV3OneRuntime {
public:
    PtxKernel() = default;
    // What a copy launches it loads itself: a module belongs to one object.
    PtxKernel(PtxKernel const& other)
        : mEntry(other.mEntry), mPtx(other.mPtx), mArchs(other.mArchs), mShared(other.mShared),
          mScratch(other.mScratch), mLaunch(other.mLaunch), mScalars(other.mScalars), mInputs(other.mInputs), mDtypes(other.mDtypes),
          mAliases(other.mAliases), mShapes(other.mShapes) {}
    PtxKernel& operator=(PtxKernel const&) = delete;
    ~PtxKernel() override {
        if (mModule != nullptr) {
            driver().unloadModule(mModule);
        }
    }

    // Take the fields; false where they do not belong together.
    bool read(PluginFieldCollection const& given) {
        for (int32_t i = 0; i < given.nbFields; ++i) {
            PluginField const& field = given.fields[i];
            std::string const name = field.name == nullptr ? "" : field.name;
            if (field.data == nullptr || field.length < 0) {
                continue;
            }
            for (auto& [key, text] : texts()) {
                if (name == key) {
                    text->assign(static_cast<char const*>(field.data), static_cast<size_t>(field.length));
                }
            }
            for (auto& [key, numbers] : lists()) {
                if (name == key) {
                    readInts(field, *numbers);
                }
            }
        }
        return fits();
    }

    IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept override {
        switch (type) {
        case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuildV2*>(this);
        case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
        case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
        }
        return nullptr;
    }
    IPluginV3* clone() noexcept override { return new PtxKernel(*this); }
    AsciiChar const* getPluginName() const noexcept override { return kNAME; }
    AsciiChar const* getPluginVersion() const noexcept override { return kVERSION; }
    AsciiChar const* getPluginNamespace() const noexcept override { return kNAMESPACE; }

    int32_t getNbOutputs() const noexcept override { return outputs(); }
    int32_t getOutputDataTypes(DataType* types, int32_t count, DataType const*, int32_t inputs) const noexcept override {
        if (count != outputs() || inputs != mInputs[0]) {
            return 1;
        }
        for (int32_t i = 0; i < count; ++i) {
            types[i] = static_cast<DataType>(mDtypes[inputs + i]);
        }
        return 0;
    }
    int32_t getOutputShapes(DimsExprs const* inputs, int32_t given, DimsExprs const*, int32_t, DimsExprs* shapes,
        int32_t count, IExprBuilder& numbers) noexcept override {
        if (count != outputs() || given != mInputs[0]) {
            return 1;
        }
        size_t at = 0;
        for (int32_t i = 0; i < count; ++i) {
            int32_t const rank = mShapes[at++];
            if (mAliases[i] >= 0) { // TensorRT wants the very expressions of the input
                shapes[i] = inputs[mAliases[i]];
                at += rank;
                continue;
            }
            shapes[i].nbDims = rank;
            for (int32_t axis = 0; axis < rank; ++axis) {
                shapes[i].d[axis] = numbers.constant(mShapes[at++]);
            }
        }
        return 0;
    }
    bool supportsFormatCombination(
        int32_t place, DynamicPluginTensorDesc const* tensors, int32_t inputs, int32_t count) noexcept override {
        return inputs == mInputs[0] && count == outputs() && tensors[place].desc.format == TensorFormat::kLINEAR
            && static_cast<int32_t>(tensors[place].desc.type) == mDtypes[place];
    }
    int32_t getAliasedInput(int32_t output) noexcept override {
        return output >= 0 && output < outputs() ? mAliases[output] : -1;
    }
    int32_t configurePlugin(
        DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*, int32_t) noexcept override {
        return 0;
    }
    size_t getWorkspaceSize(DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*,
        int32_t) const noexcept override {
        size_t const blocks = static_cast<size_t>(mLaunch[0]) * mLaunch[1] * mLaunch[2];
        return blocks * *std::max_element(mScratch.begin(), mScratch.end());
    }
    int32_t getNbTactics() noexcept override { return 1; }
    int32_t getValidTactics(int32_t* tactics, int32_t count) noexcept override {
        for (int32_t i = 0; i < count; ++i) {
            tactics[i] = i + 1;
        }
        return 0;
    }
    int32_t setTactic(int32_t) noexcept override { return 0; }
    int32_t onShapeChange(PluginTensorDesc const*, int32_t, PluginTensorDesc const*, int32_t) noexcept override {
        return 0;
    }

    // A builder calls this too, on a machine without a driver, and ends the process where it gets nothing.
    IPluginV3* attachToContext(IPluginResourceContext*) noexcept override {
        auto* attached = new PtxKernel(*this);
        if (driver().there) {
            attached->load();
        }
        return attached;
    }
    int32_t enqueue(PluginTensorDesc const*, PluginTensorDesc const*, void const* const* inputs,
        void* const* results, void* workspace, cudaStream_t stream) noexcept override {
        if (!load()) {
            return 1;
        }
        std::vector<void*> arguments;
        for (int32_t i = 0; i < mInputs[0]; ++i) {
            arguments.push_back(const_cast<void const**>(&inputs[i])); // the driver reads the pointer from there
        }
        for (int32_t i = 1; i <= mScalars[0]; ++i) {
            arguments.push_back(&mScalars[i]);
        }
        for (int32_t i = 0; i < outputs(); ++i) {
            arguments.push_back(const_cast<void**>(&results[i]));
        }
        if (mScratch[mText] > 0) {
            arguments.push_back(&workspace);
        }
        int const failed = driver().launch(mFunction, mLaunch[0], mLaunch[1], mLaunch[2], mLaunch[3], 1, 1,
            mShared[mText], stream, arguments.data(), nullptr);
        return told("cuLaunchKernel", failed) ? 0 : 1;
    }

    PluginFieldCollection const* getFieldsToSerialize() noexcept override {
        mFields.clear();
        for (auto& [key, text] : texts()) {
            mFields.emplace_back(key, text->data(), PluginFieldType::kCHAR, static_cast<int32_t>(text->size()));
        }
        for (auto& [key, numbers] : lists()) {
            mFields.emplace_back(key, numbers->data(), PluginFieldType::kINT32, static_cast<int32_t>(numbers->size()));
        }
        mCollection = {static_cast<int32_t>(mFields.size()), mFields.data()};
        return &mCollection;
    }

    std::vector<std::pair<char const*, std::string*>> texts() { return {{"entry", &mEntry}, {"ptx", &mPtx}}; }
    std::vector<std::pair<char const*, Ints*>> lists() {
        return {{"archs", &mArchs}, {"shared", &mShared}, {"scratch", &mScratch}, {"launch", &mLaunch},
            {"scalars", &mScalars}, {"inputs", &mInputs}, {"dtypes", &mDtypes}, {"aliases", &mAliases}, {"shapes", &mShapes}};
    }

private:
    static void readInts(PluginField const& field, Ints& numbers) {
        numbers.clear();
        for (int32_t i = 0; i < field.length; ++i) {
            numbers.push_back(field.type == PluginFieldType::kINT64
                    ? static_cast<int32_t>(static_cast<int64_t const*>(field.data)[i])
                    : static_cast<int32_t const*>(field.data)[i]);
        }
    }

    int32_t outputs() const noexcept { return static_cast<int32_t>(mAliases.size()); }

    bool fits() const {
        if (mEntry.empty() || mArchs.empty() || mShared.size() != mArchs.size()
            || mScratch.size() != mArchs.size() || mLaunch.size() != 4 || mInputs.size() != 1 || mScalars.empty() || mScalars[0] < 0
            || mScalars.size() != static_cast<size_t>(mScalars[0]) + 1 || mAliases.empty() || mInputs[0] < 1
            || mDtypes.size() != mAliases.size() + static_cast<size_t>(mInputs[0])
            || variants().size() != mArchs.size()) {
            return false;
        }
        size_t at = 0;
        for (int32_t const alias : mAliases) {
            if (alias < -1 || alias >= mInputs[0] || at >= mShapes.size() || mShapes[at] < 0
                || mShapes[at] > Dims::MAX_DIMS) {
                return false;
            }
            at += static_cast<size_t>(mShapes[at]) + 1;
        }
        return at == mShapes.size();
    }

    std::vector<std::string> variants() const {
        std::vector<std::string> found;
        for (size_t begin = 0; begin <= mPtx.size();) {
            size_t const end = std::min(mPtx.find('\f', begin), mPtx.size());
            found.push_back(mPtx.substr(begin, end - begin));
            begin = end + 1;
        }
        return found;
    }

    bool told(char const* what, int failed) const {
        if (failed != 0) {
            complain(std::string("seko's kernel ") + mEntry + ": " + what + " gives " + std::to_string(failed));
        }
        return failed == 0;
    }

    // The text of this very GPU, else of the nearest older one, whose PTX the driver compiles for this one. From sm_90
    // on a text is for its GPU alone: Triton uses what only that one has (sm_120a).
    bool choose() {
        int device = 0, major = 0, minor = 0;
        auto const& d = driver();
        if (!told("cuCtxGetDevice", d.currentDevice(&device))
            || !told("cuDeviceGetAttribute", d.deviceAttribute(&major, kMAJOR, device))
            || !told("cuDeviceGetAttribute", d.deviceAttribute(&minor, kMINOR, device))) {
            return false;
        }
        int const here = major * 10 + minor;
        int best = -1;
        for (size_t i = 0; i < mArchs.size(); ++i) {
            bool const fits = mArchs[i] == here || (mArchs[i] < here && mArchs[i] < kFIRST_FOR_ITSELF);
            if (fits && (best < 0 || mArchs[i] > mArchs[best])) {
                best = static_cast<int>(i);
            }
        }
        if (best < 0) {
            complain(std::string("seko's kernel ") + mEntry + " is for other GPUs than sm_" + std::to_string(here));
            return false;
        }
        mText = static_cast<size_t>(best);
        return true;
    }

    bool load() noexcept {
        if (mFunction != nullptr) {
            return true;
        }
        auto const& d = driver();
        if (!d.there) {
            complain("seko's kernels need the NVIDIA driver's libcuda.so.1");
            return false;
        }
        return choose() && told("cuModuleLoadData", d.loadModule(&mModule, variants()[mText].c_str()))
            && told("cuModuleGetFunction", d.getFunction(&mFunction, mModule, mEntry.c_str()))
            && (mShared[mText] <= kSHARED_WITHOUT_ASKING
                || told("cuFuncSetAttribute", d.setAttribute(mFunction, kMAX_DYNAMIC_SHARED, mShared[mText])));
    }

    std::string mEntry, mPtx;
    Ints mArchs, mShared, mScratch, mLaunch, mScalars, mInputs, mDtypes, mAliases, mShapes;
    size_t mText = 0;
    Module mModule = nullptr;
    Function mFunction = nullptr;
    std::vector<PluginField> mFields;
    PluginFieldCollection mCollection{0, nullptr};
};

class PtxKernelCreator final : public IPluginCreatorV3One {
public:
    PtxKernelCreator() {
        PtxKernel one;
        for (auto& [key, text] : one.texts()) {
            mFields.emplace_back(key, nullptr, PluginFieldType::kCHAR, 0);
        }
        for (auto& [key, numbers] : one.lists()) {
            mFields.emplace_back(key, nullptr, PluginFieldType::kINT32, 0);
        }
        mCollection = {static_cast<int32_t>(mFields.size()), mFields.data()};
    }
    IPluginV3* createPlugin(AsciiChar const*, PluginFieldCollection const* fields, TensorRTPhase) noexcept override {
        auto* made = new PtxKernel;
        if (fields == nullptr || !made->read(*fields)) {
            complain("seko's plugin got fields that do not belong together; rebuild the plan");
            delete made;
            return nullptr;
        }
        return made;
    }
    PluginFieldCollection const* getFieldNames() noexcept override { return &mCollection; }
    AsciiChar const* getPluginName() const noexcept override { return kNAME; }
    AsciiChar const* getPluginVersion() const noexcept override { return kVERSION; }
    AsciiChar const* getPluginNamespace() const noexcept override { return kNAMESPACE; }

private:
    std::vector<PluginField> mFields;
    PluginFieldCollection mCollection{0, nullptr};
};

PtxKernelCreator creator;
IPluginCreatorInterface* creators[] = {&creator};

} // namespace

extern "C" __attribute__((visibility("default"))) IPluginCreatorInterface* const* getCreators(int32_t& count) {
    count = 1;
    return creators;
}

extern "C" __attribute__((visibility("default"))) void setLoggerFinder(ILoggerFinder* finder) { loggers = finder; }
