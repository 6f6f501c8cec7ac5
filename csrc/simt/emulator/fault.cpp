// What a Fault says, and the process-wide configuration.
#include "simt/emulator/fault.h"

#include "simt/emulator/block.h"

namespace paged_ops::simt {

Config& config() {
  static Config config;
  return config;
}

bool Site::same_text(const Site& other) const {
  return std::strcmp(op, other.op) == 0 && where.line() == other.where.line() &&
         where.column() == other.where.column() &&
         std::strcmp(where.file_name(), other.where.file_name()) == 0;
}

std::string describe(const Site& site) {
  if (!*site.op) return "start";
  if (site.where.line() == 0) return site.op;
  const char* file = site.where.file_name();
  const char* slash = std::strrchr(file, '/');
  return concat(site.op, " at ", slash ? slash + 1 : file, ":", site.where.line());
}

std::string describe(const uint3& v) { return concat("(", v.x, ", ", v.y, ", ", v.z, ")"); }

void fault(const std::string& what, const Site& site) {
  std::string who;
  if (const Fiber* self = current_fiber)
    who = concat(" [block ", describe(self->block->block_idx), " thread ", describe(self->thread_idx), "]");
  throw Fault(concat("simt: ", describe(site), ": ", what, who));
}

}  // namespace paged_ops::simt
