  reg clk, reset, valid_in;
  wire valid_out;
  reg [@top@:0] valid;  // what valid_out must be, now and in the next cycles
  reg [15:0] random;
  integer cycle, sent, wrong_valid;
  @module@ dut (@connections@);
  initial clk = 0;
  always #5 clk = ~clk;
  task drive(input send, input clear); begin
    valid_in = send;
    reset = clear;
    inputs = send ? samples[sent % @n@] : @unknown@;
    if (send && !clear) sent = sent + 1;
    valid = clear ? 0 : (valid << 1) | send;
    @(negedge clk);
    if (valid_out !== valid[@top@]) wrong_valid = wrong_valid + 1;
    if (valid_out === 1'b1) begin
      if (outputs !== answers[got % @n@]) begin
        if (wrong == 0) begin first = got % @n@; found = outputs; end
        wrong = wrong + 1;
      end
      got = got + 1;
    end
  end endtask
  initial begin
    load;
    wrong = 0; wrong_valid = 0; sent = 0; got = 0; random = 1;
    @(negedge clk);
    drive(1, 1);
    drive(1, 1);
    while (sent < @n@) drive(1, 0);
    while (sent < 2 * @n@) begin
      random = {random[14:0], random[15] ^ random[13] ^ random[12] ^ random[10]};
      drive(random[0], 0);
    end
    for (cycle = 0; cycle < @latency@; cycle = cycle + 1) drive(0, 0);
    if (got != 2 * @n@) wrong_valid = wrong_valid + 1;
    for (cycle = 1; cycle < @latency@; cycle = cycle + 1) drive(1, 0);
    drive(1, 1);
    for (cycle = 0; cycle < @latency@; cycle = cycle + 1) drive(0, 0);
    if (wrong == 0 && wrong_valid == 0) $display("PASS: @n@ samples, latency @latency@, without and with gaps");
    else if (wrong == 0) $display("FAIL: valid_out is wrong in %0d cycles", wrong_valid);
    else $display("FAIL: %0d of %0d answers are wrong, first sample %0d: %h instead of %h; valid_out is wrong in %0d cycles",
                  wrong, got, first, found, answers[first], wrong_valid);
    $finish;
  end
