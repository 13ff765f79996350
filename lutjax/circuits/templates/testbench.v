// @n@ samples for the module @module@; prints one line, PASS or FAIL
`timescale 1ns / 1ps
`default_nettype none
module @module@_testbench;
  reg [@in_top@:0] samples [0:@last@];
  reg [@out_top@:0] answers [0:@last@];
  reg [@in_top@:0] inputs;
  wire [@out_top@:0] outputs;
  reg [@out_top@:0] found;
  integer got, wrong, first;
@body@
  task load; begin
@loads@
  end endtask
endmodule
`default_nettype wire
