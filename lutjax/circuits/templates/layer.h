/* Look-up layer of @detectors@ detectors: an output stands for y / 2**@NAME@_FRACTION. */
#ifndef @NAME@_H
#define @NAME@_H

#include <stdint.h>

#define @NAME@_INPUTS @inputs@
#define @NAME@_OUTPUTS @outputs@
#define @NAME@_FRACTION @fraction@

#ifdef __cplusplus
extern "C"
#endif
void @name@(const int32_t x[@NAME@_INPUTS], int32_t y[@NAME@_OUTPUTS]);

#endif
