// This instruction level's kernels, by name.
#include "kernels.h"

namespace lutjax {
namespace LUTJAX_LEVEL {

#define KERNEL(name) const char* name(const Call& call);
#include "kernels.def"
#undef KERNEL

#define KERNEL(name) {#name, name},
extern const Named by_name[] = {
#include "kernels.def"
    {nullptr, nullptr}};
#undef KERNEL

}  // namespace LUTJAX_LEVEL
}  // namespace lutjax
