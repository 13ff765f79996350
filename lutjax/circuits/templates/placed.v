module top (input wire clk, input wire reset, input wire valid_in, input wire number, output wire valid_out, output wire parity);
  reg [@in_top@:0] inputs;
  reg [@out_top@:0] outputs, parities;
  wire [@out_top@:0] answers;
  always @(posedge clk) begin
    inputs <= {inputs, number};
    outputs <= answers;
    parities <= outputs ^ {parities, 1'b0};
  end
  assign parity = parities[@out_top@];
  @module@ dut (@connections@);
  @valid@
endmodule
