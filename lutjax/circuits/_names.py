"""Valid names in Verilog, VHDL and C."""

import re

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_VERILOG = """
always and assign automatic begin buf bufif0 bufif1 case casex casez cell cmos config deassign
default defparam design disable edge else end endcase endconfig endfunction endgenerate endmodule
endprimitive endspecify endtable endtask event for force forever fork function generate genvar
highz0 highz1 if ifnone incdir include initial inout input instance integer join large liblist
library localparam macromodule medium module nand negedge nmos nor noshowcancelled not notif0 notif1
or output parameter pmos posedge primitive pull0 pull1 pulldown pullup pulsestyle_ondetect
pulsestyle_onevent rcmos real realtime reg release repeat rnmos rpmos rtran rtranif0 rtranif1
scalared showcancelled signed small specify specparam strong0 strong1 supply0 supply1 table task
time tran tranif0 tranif1 tri tri0 tri1 triand trior trireg unsigned use uwire vectored wait wand
weak0 weak1 while wire wor xnor xor accept_on alias always_comb always_ff always_latch assert assume
before bind bins binsof bit break byte chandle checker class clocking const constraint context
continue cover covergroup coverpoint cross dist do endchecker endclass endclocking endgroup
endinterface endpackage endprogram endproperty endsequence enum eventually expect export extends
extern final first_match foreach forkjoin global iff ignore_bins illegal_bins implements implies
import inside int interconnect interface intersect join_any join_none let local logic longint
matches modport nettype new nexttime null package packed priority program property protected pure
rand randc randcase randsequence ref reject_on restrict return s_always s_eventually s_nexttime
s_until s_until_with sequence shortint shortreal soft solve static string strong struct super
sync_accept_on sync_reject_on tagged this throughout timeprecision timeunit type typedef union
unique unique0 until until_with untyped var virtual void wait_order weak wildcard with within
"""
_VHDL = """
abs access after alias all and architecture array assert attribute begin block body buffer bus case
component configuration constant disconnect downto else elsif end entity exit file for function
generate generic group guarded if impure in inertial inout is label library linkage literal loop map
mod nand new next nor not null of on open or others out package port postponed procedure process
protected pure range record register reject rem report return rol ror select severity signal shared
sla sll sra srl subtype then to transport type unaffected units until use variable wait when while
with xnor xor
"""
_C = """
auto break case char const continue default do double else enum extern float for goto if inline int
long register restrict return short signed sizeof static struct switch typedef union unsigned void
volatile while _Bool _Complex _Imaginary _Alignas _Alignof _Atomic _Generic _Noreturn _Static_assert
_Thread_local alignas alignof bool constexpr false nullptr static_assert thread_local true typeof
typeof_unqual asm main
"""
_CPP = """
alignas alignof and and_eq asm bitand bitor bool catch char8_t char16_t char32_t class co_await
co_return co_yield compl concept const_cast consteval constexpr constinit decltype delete
dynamic_cast explicit export false friend mutable namespace new noexcept not not_eq nullptr operator
or or_eq private protected public reinterpret_cast requires static_assert static_cast template this
thread_local throw true try typeid typename using virtual wchar_t xor xor_eq
"""
# C99 library functions, callable by any program; float and long double variants are listed once.
_MATHEMATICS = """
acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh erf erfc exp exp2 expm1 fabs fdim
floor fma fmax fmin fmod frexp hypot ilogb ldexp lgamma llrint llround log log10 log1p log2 logb
lrint lround modf nan nearbyint nextafter nexttoward pow remainder remquo rint round scalbln scalbn
sin sinh sqrt tan tanh tgamma trunc cabs cacos cacosh carg casin casinh catan catanh ccos ccosh cexp
cimag clog clog10 conj cpow cproj creal csin csinh csqrt ctan ctanh drem exp10 finite gamma isinf
isnan j0 j1 jn pow10 roundeven scalb significand sincos y0 y1 yn
"""
_LIBRARY = """
abort abs asctime assert atexit atof atoi atol atoll bsearch btowc calloc clearerr clock ctime
difftime div exit fclose feclearexcept fegetenv fegetexceptflag fegetround feholdexcept feof
feraiseexcept ferror fesetenv fesetexceptflag fesetround fetestexcept feupdateenv fflush fgetc
fgetpos fgets fgetwc fgetws fopen fpclassify fprintf fputc fputs fputwc fputws fread free freopen
fscanf fseek fsetpos ftell fwide fwprintf fwrite fwscanf getc getchar getenv gets getwc getwchar
gmtime imaxabs imaxdiv isalnum isalpha isblank iscntrl isdigit isfinite isgraph isgreater isless
islower isnormal isprint ispunct isspace isunordered isupper iswalnum iswalpha iswblank iswcntrl
iswctype iswdigit iswgraph iswlower iswprint iswpunct iswspace iswupper iswxdigit isxdigit labs ldiv
llabs lldiv localeconv localtime longjmp malloc mblen mbrlen mbrtowc mbsinit mbsrtowcs mbstowcs
mbtowc memchr memcmp memcpy memmove memset mktime offsetof perror printf putc putchar puts putwc
putwchar qsort raise rand realloc remove rename rewind scanf setbuf setjmp setlocale setvbuf signal
signbit snprintf sprintf srand sscanf stderr stdin stdout strcat strchr strcmp strcoll strcpy
strcspn strerror strftime strlen strncat strncmp strncpy strpbrk strrchr strspn strstr strtod strtof
strtoimax strtok strtol strtold strtoll strtoul strtoull strtoumax strxfrm swprintf swscanf system
time tmpfile tmpnam tolower toupper towctrans towlower towupper ungetc ungetwc va_arg va_copy va_end
va_start vfprintf vfscanf vfwprintf vfwscanf vprintf vscanf vsnprintf vsprintf vsscanf vswprintf
vswscanf vwprintf vwscanf wcrtomb wcscat wcschr wcscmp wcscoll wcscpy wcscspn wcsftime wcslen
wcsncat wcsncmp wcsncpy wcspbrk wcsrchr wcsrtombs wcsspn wcsstr wcstod wcstof wcstoimax wcstok
wcstol wcstold wcstoll wcstombs wcstoul wcstoull wcstoumax wcsxfrm wctob wctomb wctrans wctype
wmemchr wmemcmp wmemcpy wmemmove wmemset wprintf wscanf alloca aligned_alloc bcmp bcopy bzero
dcgettext dgettext execl execle execlp execv execve execvp ffs ffsl ffsll fork fputc_unlocked
fputs_unlocked fwrite_unlocked gettext index isascii mempcpy posix_memalign putc_unlocked
putchar_unlocked rindex stpcpy stpncpy strcasecmp strdup strfmon strncasecmp strndup strnlen toascii
"""
# POSIX functions: a circuit function with such a name would replace the system function.
_SYSTEM = """
accept access acct alarm bind brk chdir chmod chown chroot clone close closedir connect creat crypt
daemon dup dup2 encrypt environ fchdir fchmod fchown fcntl fdatasync fdopen fileno flock fstat fsync
ftruncate getcwd getegid geteuid getgid getgroups gethostname getlogin getopt getpgid getpgrp getpid
getppid getsid getsockopt getuid ioctl isatty kill lchown link listen lockf lseek lstat mkdir mkfifo
mknod mlock mmap mount mprotect msync munmap nanosleep nice open opendir openat optarg opterr optind
optopt pathconf pause pclose pipe poll popen pread profil pselect ptrace pwrite read readdir
readlink readv reboot recv recvfrom recvmsg rmdir sbrk select send sendmsg sendto setegid seteuid
setgid setgroups setpgid setsid setsockopt setuid shutdown sleep socket socketpair splice stat
statfs swab symlink sync syscall sysconf tee times truncate ttyname ualarm umask umount uname unlink
usleep utime utimes vfork wait wait3 wait4 waitpid write writev
"""
_HEADERS = """
assert complex ctype errno fenv float inttypes iso646 limits locale math setjmp signal stdalign
stdarg stdatomic stdbool stddef stdint stdio stdlib stdnoreturn string tgmath threads time uchar
wchar wctype
"""
_MACROS = "i386 linux unix vax errno"  # predefined by compilers without options
_TYPE = re.compile(r"u?int(_least|_fast)?(8|16|32|64)_t|u?int(max|ptr)_t|size_t|ptrdiff_t")
KEYWORDS = {
    "Verilog": frozenset(_VERILOG.split()),
    "VHDL": frozenset(_VHDL.split()),
    "C": frozenset(_C.split()),
    "C++": frozenset((_C + _CPP).split()),
}
HEADERS = frozenset(_HEADERS.split())
"""C header names without their suffix."""

_ENDS = ("", "f", "l", "_r", "f_r", "l_r", "f16", "f32", "f64", "f128", "f32x", "f64x")
_FUNCTIONS = frozenset(
    (
        *_LIBRARY.split(),
        *_SYSTEM.split(),
        *(name + end for name in _MATHEMATICS.split() for end in _ENDS),
    )
)


def explain_bad_function(name: str) -> str | None:
    """Return the reason if a C function and its header cannot have this name, else None."""
    if name in KEYWORDS["C++"]:
        return "it is a keyword of C or C++"
    if name in _FUNCTIONS or name in HEADERS or name in _MACROS.split() or _TYPE.fullmatch(name):
        return "it is a name of the library of C, or of compilers"
    return None


def explain_bad_port(name: object) -> str | None:
    """Return the reason if a port cannot have this name, else None."""
    if not isinstance(name, str) or not _WORD.fullmatch(name):
        return "a name has letters, digits and underscores, and begins with no digit"
    for language in ("Verilog", "VHDL", "C"):
        words = KEYWORDS[language]
        # VHDL is case-insensitive.
        if (name.lower() if language == "VHDL" else name) in words:
            return f"it is a keyword of {language}; take another name"
    return None
