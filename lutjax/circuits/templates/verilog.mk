verilog:
	@if command -v iverilog > /dev/null; then set -e; mkdir -p build; \
	  iverilog -g2005 -o build/@name@.vvp @name@.v @name@_testbench.v; \
	  vvp build/@name@.vvp | tee build/verilog.log; grep -q ^PASS build/verilog.log; \
	else echo "verilog: skipped, as iverilog is not found"; fi

# Cells of a synthesis by yosys, in look-up tables of 6 inputs.
synth:
	yosys -p "read_verilog @name@.v; synth -top @name@ -lut 6; stat"
