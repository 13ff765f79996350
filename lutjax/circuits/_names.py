"""Names that can stand in Verilog, VHDL and C."""

import re

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_VERILOG = """
always and assign automatic begin buf bufif0 bufif1 case casex casez cell cmos config deassign default defparam design
disable edge else end endcase endconfig endfunction endgenerate endmodule endprimitive endspecify endtable endtask event
for force forever fork function generate genvar highz0 highz1 if ifnone incdir include initial inout input instance
integer join large liblist library localparam macromodule medium module nand negedge nmos nor noshowcancelled not notif0
notif1 or output parameter pmos posedge primitive pull0 pull1 pulldown pullup pulsestyle_ondetect pulsestyle_onevent
rcmos real realtime reg release repeat rnmos rpmos rtran rtranif0 rtranif1 scalared showcancelled signed small specify
specparam strong0 strong1 supply0 supply1 table task time tran tranif0 tranif1 tri tri0 tri1 triand trior trireg
unsigned use uwire vectored wait wand weak0 weak1 while wire wor xnor xor
accept_on alias always_comb always_ff always_latch assert assume before bind bins binsof bit break byte chandle checker
class clocking const constraint context continue cover covergroup coverpoint cross dist do endchecker endclass
endclocking endgroup endinterface endpackage endprogram endproperty endsequence enum eventually expect export extends
extern final first_match foreach forkjoin global iff ignore_bins illegal_bins implements implies import inside int
interconnect interface intersect join_any join_none let local logic longint matches modport nettype new nexttime null
package packed priority program property protected pure rand randc randcase randsequence ref reject_on restrict return
s_always s_eventually s_nexttime s_until s_until_with sequence shortint shortreal soft solve static string strong struct
super sync_accept_on sync_reject_on tagged this throughout timeprecision timeunit type typedef union unique unique0
until until_with untyped var virtual void wait_order weak wildcard with within
"""
_VHDL = """
abs access after alias all and architecture array assert attribute begin block body buffer bus case component
configuration constant disconnect downto else elsif end entity exit file for function generate generic group guarded if
impure in inertial inout is label library linkage literal loop map mod nand new next nor not null of on open or others
out package port postponed procedure process protected pure range record register reject rem report return rol ror
select severity signal shared sla sll sra srl subtype then to transport type unaffected units until use variable wait
when while with xnor xor
"""
_C = """
auto break case char const continue default do double else enum extern float for goto if inline int long register
restrict return short signed sizeof static struct switch typedef union unsigned void volatile while _Bool _Complex
_Imaginary _Alignas _Alignof _Atomic _Generic _Noreturn _Static_assert _Thread_local alignas alignof bool constexpr
false nullptr static_assert thread_local true typeof typeof_unqual asm main
"""
KEYWORDS = {
    "Verilog": frozenset(_VERILOG.split()),
    "VHDL": frozenset(_VHDL.split()),
    "C": frozenset(_C.split()),
}


def why_not(name: object) -> str | None:
    """Return why a port cannot have a name, None if it can."""
    if not isinstance(name, str) or not _WORD.fullmatch(name):
        return "a name has letters, digits and underscores, and begins with no digit"
    for language, words in KEYWORDS.items():
        if (name.lower() if language == "VHDL" else name) in words:  # VHDL does not tell capitals apart
            return f"it is a keyword of {language}; take another name"
    return None
