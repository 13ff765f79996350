// @module@_board: @module@ between the two lines of a serial port of @baud@ bits a second, with 8 data bits, no parity and one stop bit.
// A sample has @bytes_in@ bytes and an answer @bytes_out@, the lowest first. A sample that stops for @quiet_ms@ milliseconds is forgotten.
`default_nettype none
module @module@_board (
  input wire clock,
  input wire from_host,
  output reg to_host,
  output wire led
);
  // Registers begin at 0. The reset lasts 15 cycles.
  reg [3:0] since = 0;
  wire reset = since != 15;
  always @(posedge clock) if (reset) since <= since + 1;

  // In: the line falls before a byte, and each bit is read in its middle.
  reg [1:0] line = 3;
  reg [@wait_top@:0] wait_in = 0;  // cycles up to the next bit
  reg [3:0] bits_in = 0;  // that come, with the stop bit
  reg [@sample_top@:0] sample = 0;
  reg [@count_in_top@:0] have = 0;  // bytes
  reg [@quiet_top@:0] quiet = 0;  // cycles since the last byte
  wire in_ready;
  wire full = have == @bytes_in@;
  always @(posedge clock) begin
    line <= {line[0], from_host};
    quiet <= bits_in != 0 || full ? 0 : quiet + 1;
    if (full && in_ready) have <= 0;
    if (&quiet) have <= 0;
    if (reset) bits_in <= 0;
    else if (bits_in == 0) begin
      if (!line[1]) begin
        bits_in <= 9;
        wait_in <= @bit_and_a_half@;
      end
    end else if (wait_in != 0) wait_in <= wait_in - 1;
    else begin
      bits_in <= bits_in - 1;
      wait_in <= @bit@;
      if (bits_in != 1) sample <= {line[1], sample[@sample_top@:1]};
      else have <= have + 1;
    end
  end

  // Out: a start bit, 8 bits and a stop bit for each byte.
  reg [@wait_top@:0] wait_out = 0;
  reg [3:0] bits_out = 0;
  reg [@count_out_top@:0] left = 0;  // bytes
  reg [@answer_top@:0] answer = 0;
  wire [@out_top@:0] found;
  wire out_valid;
  wire out_ready = !reset && wait_out == 0 && bits_out == 0 && left == 0;
  reg lit = 0;  // changes with each answer
  assign led = lit;
  initial to_host = 1;
  always @(posedge clock) begin
    if (reset) to_host <= 1;
    else if (wait_out != 0) wait_out <= wait_out - 1;
    else if (bits_out != 0) begin
      wait_out <= @bit@;
      bits_out <= bits_out - 1;
      to_host <= bits_out == 1 || answer[0];
      if (bits_out != 1) answer <= answer >> 1;
    end else if (left != 0) begin
      wait_out <= @bit@;
      bits_out <= 9;
      left <= left - 1;
      to_host <= 0;
    end else if (out_valid) begin
      answer <= found;
      left <= @bytes_out@;
      lit <= !lit;
    end
  end

  @module@_stream samples (
    .clk(clock), .reset(reset), .in_valid(full), .in_ready(in_ready), .in_data(sample[@in_top@:0]),
    .out_valid(out_valid), .out_ready(out_ready), .out_data(found)
  );
endmodule
`default_nettype wire
