// Memory of large tables in large pages.
#pragma once

#include <cstddef>

namespace lutjax {

// Says that memory is a table that was updated in place. Reads of random rows of gigabytes wait for addresses of pages more than for the
// rows, so once such memory has stayed where it is for some steps it is moved into large pages, where the system has them.
void updated_in_place(void* table, size_t bytes);

}  // namespace lutjax
