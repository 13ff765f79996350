/* Continue a text: the prompt is an argument, or else all of the standard input. The new bytes go to the standard output. */
#include <stdio.h>
#include <string.h>

#include "language_model.h"
#include "tables.h"

static const char usage[] =
    "usage: language_model [-n BYTES] [-t TEMPERATURE] [-k TOP_K] [-s SEED] [-l] "
#if LM_TABLES_IN_FILE
    "[-m TABLES] "
#endif
    "[PROMPT]\n"
    "  -n  how much to add; 500\n"
    "  -t  0 takes the likeliest byte, above it more varied text, at most three digits after the point; 0.8\n"
    "  -k  draw only from so many of the likeliest bytes; 256\n"
    "  -s  seed of the draws; 0\n"
    "  -l  the logits before each new byte, whole numbers, in place of it\n"
#if LM_TABLES_IN_FILE
    "  -m  file of the tables; tables.bin beside the program\n"
#endif
    "  --  what follows is the prompt, even if it looks like an option\n"
    "Without PROMPT it is read from the standard input.\n";

/* A number with so many digits after the point, in units of the last one; -1 where it is none or above the limit. */
static int64_t number(const char *text, int digits, uint64_t most, uint64_t *value)
{
    uint64_t n = 0;
    int after = -1, any = 0;
    for (; *text; text++) {
        if (*text == '.' && digits && after < 0) {
            after = 0;
            continue;
        }
        if (*text < '0' || *text > '9' || after == digits)
            return -1;
        if (n > (most - (uint64_t)(*text - '0')) / 10)
            return -1;
        n = 10 * n + (uint64_t)(*text - '0');
        any = 1;
        after += after >= 0;
    }
    for (int k = after < 0 ? 0 : after; k < digits; k++) {
        if (n > most / 10)
            return -1;
        n *= 10;
    }
    *value = n;
    return any && n <= most ? 0 : -1;
}

static int fail(const char *what)
{
    fprintf(stderr, "language_model: %s\n%s", what, usage);
    return 2;
}

#if LM_TABLES_IN_FILE
lm_value lm_tables[LM_TABLE_SIZE];

/* The path of the tables in the folder of the program. */
static const char *beside(const char *program)
{
    static char path[4096];
    const char *name = "tables.bin", *end = strrchr(program ? program : "", '/');
    size_t length = end ? (size_t)(end + 1 - program) : 0;
    if (length + strlen(name) >= sizeof path)
        return name;
    if (length)
        memcpy(path, program, length);
    strcpy(path + length, name);
    return path;
}

/* Read tables of numbers whose lowest byte is first. */
static int read_tables(const char *path)
{
    unsigned char buffer[4096 * sizeof(lm_value)];
    size_t n = 0;
    FILE *file = fopen(path, "rb");
    if (!file)
        return -1;
    while (n < LM_TABLE_SIZE) {
        size_t wanted = LM_TABLE_SIZE - n < 4096 ? LM_TABLE_SIZE - n : 4096;
        if (fread(buffer, sizeof(lm_value), wanted, file) != wanted)
            break;
        for (size_t k = 0; k < wanted; k++) {
            uint32_t bits = 0;
            for (size_t byte = 0; byte < sizeof(lm_value); byte++)
                bits |= (uint32_t)buffer[k * sizeof(lm_value) + byte] << (8 * byte);
            uint32_t sign = (uint32_t)1 << (8 * sizeof(lm_value) - 1);
            lm_tables[n++] = (lm_value)((int64_t)(bits & (sign - 1)) - (int64_t)(bits & sign));
        }
    }
    int whole = n == LM_TABLE_SIZE && fgetc(file) == EOF;
    fclose(file);
    return whole ? 0 : -1;
}
#endif

int main(int argc, char **argv)
{
    static lm_state state;
    int32_t logits[LM_BYTES];
    uint64_t n = 500, temperature = 800, top_k = LM_BYTES, random = 0, length = 0;
    int show_logits = 0, options = 1;
    const char *prompt = NULL;
#if LM_TABLES_IN_FILE
    const char *path = beside(argv[0]);
#endif
    for (int k = 1; k < argc; k++) {
        const char *word = argv[k];
        int option = options && word[0] == '-' && word[1] && !word[2] ? word[1] : 0;
        if (option == '-') {
            options = 0;
            continue;
        }
        if (option == 'l') {
            show_logits = 1;
            continue;
        }
        if (option && strchr("ntksm", option)) {
            int bad = 0;
            if (++k == argc)
                return fail("an option lacks its value.");
            if (option == 'n')
                bad = number(argv[k], 0, UINT64_MAX, &n) != 0;
            else if (option == 't')
                bad = number(argv[k], 3, 1000000, &temperature) != 0;
            else if (option == 'k')
                bad = number(argv[k], 0, LM_BYTES, &top_k) != 0 || top_k == 0;
            else if (option == 's')
                bad = number(argv[k], 0, UINT64_MAX, &random) != 0;
#if LM_TABLES_IN_FILE
            else
                path = argv[k];
#else
            else
                return fail("the tables are in the program; it takes no -m.");
#endif
            if (bad)
                return fail("the value of an option is no number, or out of range.");
            continue;
        }
        if (option == 'h')
            return fputs(usage, stdout) < 0;
        if (prompt)
            return fail("there is more than one prompt; put it in quotes.");
        prompt = word;
    }
#if LM_TABLES_IN_FILE
    if (read_tables(path) != 0)
        return fail("the file of the tables cannot be read, or it is of another size; name it with -m.");
#endif
    lm_start(&state);
    for (; prompt && prompt[length]; length++)
        lm_feed(&state, (uint8_t)prompt[length]);
    for (int byte; !prompt && (byte = getchar()) != EOF; length++)
        lm_feed(&state, (uint8_t)byte);
    if (length == 0)
        return fail("the prompt is empty; give at least one byte to continue.");
    for (; n > 0; n--) {
        lm_logits(&state, logits);
        uint8_t byte = lm_choose(logits, (uint32_t)temperature, (int)top_k, &random);
        for (int k = 0; show_logits && k < LM_BYTES; k++)
            printf("%ld%c", (long)logits[k], k + 1 < LM_BYTES ? ' ' : '\n');
        if (!show_logits)
            putchar(byte);
        if (n > 1)
            lm_feed(&state, byte);
    }
    return fflush(stdout) != 0 || ferror(stdout) ? 1 : 0;
}
