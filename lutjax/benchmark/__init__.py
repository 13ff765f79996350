"""Op benchmarks for ``lutjax bench``: device times and required memory traffic."""
