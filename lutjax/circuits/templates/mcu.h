/* @title@
 *
@summary@
 *
@numbers@
 *
 * @memory@
 */
#ifndef @NAME@_H
#define @NAME@_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The answer to one sample@answers@. */
@result@ @name@_predict(@parameters@);
@number@@row@
#ifdef __cplusplus
}
#endif

#endif
