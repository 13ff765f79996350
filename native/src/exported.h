// Functions called from Python.
#pragma once

#ifdef _WIN32
#define LUTJAX_EXPORT extern "C" __declspec(dllexport)
#else
#define LUTJAX_EXPORT extern "C" __attribute__((visibility("default")))
#endif
