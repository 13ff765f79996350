  @module@ dut (@connections@);
  initial begin
    load;
    wrong = 0;
    for (got = 0; got < @n@; got = got + 1) begin
      inputs = samples[got];
      #1;
      if (outputs !== answers[got]) begin
        if (wrong == 0) begin first = got; found = outputs; end
        wrong = wrong + 1;
      end
      #1;
    end
    if (wrong == 0) $display("PASS: @n@ samples");
    else $display("FAIL: %0d of @n@ samples have a wrong answer, first sample %0d: %h instead of %h",
                  wrong, first, found, answers[first]);
    $finish;
  end
