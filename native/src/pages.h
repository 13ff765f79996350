// Large tables in huge pages.
#pragma once

#include <cstddef>

namespace lutjax {

// Reports that a table was updated in place. Random reads from gigabytes of rows wait more for page translations than for the rows,
// so memory that stays in place for several steps is moved into huge pages, if the system supports them.
void updated_in_place(void* table, size_t bytes);

}  // namespace lutjax
