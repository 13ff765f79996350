// @module@_stream: @module@ between two streams, one sample in each transfer
@about@
`default_nettype none
module @module@_stream (
@ports@
);
  // A sample is taken only where the queue has room for its answer, so no answer ever waits inside of @module@.
  wire [@in_top@:0] inputs = @data_in@;
  wire [@out_top@:0] answers;
  reg [@out_top@:0] queue [0:@last@];
  reg lasts [0:@last@];
  reg [@top@:0] taken, done, given;  // samples, answers, and answers that have left, modulo twice the size of the queue
  wire [@top@:0] waiting = taken - given;
  wire ready = !@reset@ && waiting != @size@'d@depth@;
  wire valid = done != given;
  wire take = @valid_in@ && ready;
  wire answered;
  always @(posedge @clock@) begin
    if (take) lasts[taken[@place@:0]] <= @last_in@;
    if (answered) queue[done[@place@:0]] <= answers;
    taken <= @reset@ ? @size@'d0 : taken + take;
    done <= @reset@ ? @size@'d0 : done + answered;
    given <= @reset@ ? @size@'d0 : given + (valid && @ready_out@);
  end
@assigns@
  @module@ samples_to_answers (@connections@);
@answered@
endmodule
`default_nettype wire
