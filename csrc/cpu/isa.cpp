// Run-time choice of the instruction set: a table, best first, asked once.
#include "cpu/isa.h"

#include <atomic>
#include <cstdlib>

#include "core/check.h"

#if defined(PAGED_OPS_X86_KERNELS)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace paged_ops::cpu {

// Each is the whole of a translation unit with compile flags of its own (isa_*.cpp).
#if defined(PAGED_OPS_X86_KERNELS)
namespace amx {
void add_to(Kernels& kernels);  // AVX-512's, where tiles do better
}
namespace avx512 {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
#endif
namespace scalar {
extern const Kernels kernels;
}

namespace {

#if defined(PAGED_OPS_X86_KERNELS)

struct Features {
  bool avx2 = false;    // with FMA and F16C
  bool avx512 = false;  // F, BW, DQ, VL
  bool amx = false;     // AMX-TILE, AMX-BF16, AVX512-BF16, AVX512-VBMI and GFNI
};

// Tile registers are large: Linux saves them only for processes that have asked.
bool may_use_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// An instruction set counts when the CPU has it (CPUID) and the system saves its registers (XCR0).
Features features() {
  Features found;
  unsigned eax, ebx, ecx, edx;
  const auto has = [](unsigned word, int bit) { return (word >> bit & 1) != 0; };
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !has(ecx, 27)) return found;  // no XGETBV
  const bool fma_f16c = has(ecx, 12) && has(ecx, 28) && has(ecx, 29);
  unsigned xcr0, xcr0_high;
  asm("xgetbv" : "=a"(xcr0), "=d"(xcr0_high) : "c"(0));
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return found;
  found.avx2 = fma_f16c && has(ebx, 5) && (xcr0 & 0x06) == 0x06;
  found.avx512 =
      found.avx2 && has(ebx, 16) && has(ebx, 17) && has(ebx, 30) && has(ebx, 31) && (xcr0 & 0xe6) == 0xe6;
  const bool tiles = found.avx512 && has(edx, 22) && has(edx, 24) && (xcr0 & 0x60000) == 0x60000 &&
                     has(ecx, 1) && has(ecx, 8);
  found.amx = tiles && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && has(eax, 5) && may_use_tiles();
  return found;
}

#endif

struct Entry {
  const char* name;
  const Kernels* kernels;
  bool supported;
};

const std::vector<Entry>& table() {
  static const std::vector<Entry> entries = [] {
#if defined(PAGED_OPS_X86_KERNELS)
    const Features found = features();
    static const Kernels amx_kernels = [&] {
      Kernels kernels = avx512::kernels;
      if (found.amx) amx::add_to(kernels);  // which is compiled for AVX-512 itself
      return kernels;
    }();
    return std::vector<Entry>{{"amx", &amx_kernels, found.amx},
                              {"avx512", &avx512::kernels, found.avx512},
                              {"avx2", &avx2::kernels, found.avx2},
                              {"scalar", &scalar::kernels, true}};
#else
    return std::vector<Entry>{{"scalar", &scalar::kernels, true}};
#endif
  }();
  return entries;
}

std::atomic<const Entry*> selected{nullptr};

const Entry& find(const char* argument, const std::string& name) {
  std::string available;
  for (const Entry& entry : table()) {
    if (!entry.supported) continue;
    if (entry.name == name) return entry;
    available += (available.empty() ? "" : ", ") + std::string(entry.name);
  }
  fail(argument, ": is \"", name, "\", wanted one of ", available);
}

const Entry& current() {
  const Entry* entry = selected.load(std::memory_order_acquire);
  if (entry) return *entry;
  if (const char* name = std::getenv("PAGED_OPS_CPU_ISA"); name && *name) {
    entry = &find("PAGED_OPS_CPU_ISA", name);
  } else {
    for (const Entry& candidate : table())
      if (!entry && candidate.supported) entry = &candidate;
  }
  selected.store(entry, std::memory_order_release);
  return *entry;
}

}  // namespace

std::vector<std::string> compiled_isas() {
  std::vector<std::string> names;
  for (const Entry& entry : table()) names.push_back(entry.name);
  return names;
}

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Entry& entry : table())
    if (entry.supported) names.push_back(entry.name);
  return names;
}

std::string selected_isa() { return current().name; }

void select_isa(const std::string& name) { selected.store(&find("name", name), std::memory_order_release); }

const Kernels& kernels() { return *current().kernels; }

}  // namespace paged_ops::cpu
