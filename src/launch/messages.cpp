#include "launch/messages.h"

#include "base/records.h"
#include "net/socket.h"

#include <utility>

namespace cohort::launch {

// One list of fields per message serves both directions (base/records.h).
#define FIELDS(Message, ...)                      \
  template <class M, class A>                     \
  void visit_fields(M& m, A& a, const Message*) { \
    a(__VA_ARGS__);                               \
  }
FIELDS(Hello, m.protocol, m.version, m.host_index, m.host, m.pid, m.cores, m.free_port, m.build, m.nodes, m.ranks,
       m.nodes_id, m.devices, m.router)
FIELDS(Started, m.pids, m.threads)
FIELDS(StartFailed, m.rank, m.reason)
FIELDS(Output, m.rank, codec::below(m.stream, 2, "there is no such stream"), m.bytes)
FIELDS(Exited, m.rank, m.status.code, m.status.signal, m.status.core_dumped, m.before_stop, m.out_of_memory, m.after_ns,
       m.last_stderr, m.last, m.words, m.cause)
FIELDS(CauseReport, m.code, m.rank, m.peer, m.sequence, m.host, m.operation)
FIELDS(GroupReport, m.id, m.rank, m.size, m.begun, m.ended, m.operation, m.waiting, m.waited_ns, m.longest_ns,
       m.longest_number, m.message, m.peer, m.message_number)
FIELDS(NamedReport, m.waiting, m.name, m.ended)
FIELDS(TimesReport, m.steps, m.steps_ns, m.operations, m.bytes, m.busy_ns, m.waited_ns, m.wire_ns, m.wire_bytes,
       m.exposed_ns)
FIELDS(RankReport, m.rank, m.pid, m.has_page, m.forming, m.worlds, m.formed_epoch, m.has_state, m.state, m.cpu_ms,
       m.memory, m.step, m.samples, m.exposed_ns, m.not_finite, m.not_finite_step, m.tells_stacks, m.saves_when_asked,
       m.preempted_by, m.groups, m.named, m.times, m.losses)
FIELDS(LossReport, m.segments, m.timeouts, m.timeouts_ms, m.host)
FIELDS(GpuUse, m.percent, m.memory)
FIELDS(Reports, m.ranks, m.gpus)
FIELDS(Stacks, m.rank, m.text)
template <class M, class A>
void visit_fields(M&, A& a, const AskStacks*) {
  a();
}
FIELDS(InputTaken, m.bytes)
FIELDS(Trouble, m.text)
FIELDS(AllGone, m.swept, m.stuck)
FIELDS(Ends, m.why)
FIELDS(Told, m.signal)
FIELDS(Refused, m.why)
FIELDS(WorkerPlan, m.rank, m.environment, codec::below(m.role, 3, "there is no such role"), m.number)
FIELDS(RoleProgram, codec::below(m.role, 3, "there is no such role"), m.path, m.arguments)
FIELDS(StartJob, m.path, m.arguments, m.environment, m.folder, m.log_folder, m.workers, m.input, m.tail_lines,
       m.open_files, m.bind_to_cores, m.elsewhere, m.run_folder, m.divides_cores, m.trace, m.programs, m.servers_again,
       m.ignored, m.elastic)
FIELDS(StartedAgain, m.rank, m.pid, m.why)
FIELDS(StartAgain, m.rank, m.environment)
FIELDS(GoOnWithout, m.rank)
FIELDS(StartMore, m.worker)
FIELDS(NewMembership, m.epoch)
FIELDS(KillWorker, m.rank)
FIELDS(Input, m.bytes)
FIELDS(OutputTaken, m.bytes)
FIELDS(SignalWorkers, m.signal)
FIELDS(StopWorkers, m.signal, m.grace_ms, m.saving_ms, codec::below(m.role, 3, "there is no such role"))
FIELDS(TracePiece, m.base_ns, m.events)
FIELDS(ClockAnswer, m.number, m.now_ns)
FIELDS(ClockQuestion, m.number)
FIELDS(LeasedPorts, codec::most(m.ports, 65536), m.why)
FIELDS(LeasePorts, m.count)
FIELDS(Finish, m.status)
FIELDS(MessageNumber, m.host, m.number, m.received)
FIELDS(Relayed, m.number, m.bytes)
FIELDS(RelayedToMany, m.numbers, m.bytes)
FIELDS(ChildLink, m.host, codec::below(m.state, 4, "there is no such state"), m.text)
template <class M, class A>
void visit_fields(M&, A& a, const RouterRuns*) {
  a();
}

#undef FIELDS

std::string encode(const Message& message) { return codec::encode(message); }

Result<Message> decode(std::string_view bytes) {
  if (bytes.empty()) return fail(ErrorCode::Corrupt, "empty message");
  return codec::decode<Message>(bytes, {.longest_text = kLongestMessage, .most_elements = kLongestMessage});
}

net::SecureOptions control_options() {
  net::SecureOptions options;
  options.purpose = "control";
  options.longest_message = kLongestMessage;
  return options;
}

Channel::Channel(Loop& loop, net::SecureConnection connection, OnMessage on_message, OnClosed on_closed)
    : loop_(loop),
      connection_(std::move(connection)),
      peer_(connection_->peer()),
      own_(net::local_endpoint(connection_->fd())),
      other_(net::peer_endpoint(connection_->fd())),
      watch_(loop, connection_->fd()),
      on_message_(std::move(on_message)),
      on_closed_(std::move(on_closed)) {
  begun_ = Timer(loop, {}, [this] { advance(); });
  pause_reading(false);
  update_interest();
}

void Channel::pause_reading(bool paused) {
  if (closed_) return;
  if (paused)
    watch_.on_readable(nullptr);
  else
    watch_.on_readable([this] { advance(); });
}

void Channel::send(const Message& message) {
  if (closed_) return;
  if (auto queued = connection_->queue(encode(message)); !queued) return close(queued.error());
  update_interest();
}

void Channel::watch_link(std::chrono::milliseconds longest) {
  if (closed_) return;
  net::watch_link(connection_->fd());
  look_at_link(longest);
}

std::chrono::milliseconds Channel::silence() const {
  return closed_ ? std::chrono::milliseconds(0)
                 : net::link_silence(connection_->fd()).value_or(std::chrono::milliseconds(0));
}

void Channel::look_at_link(std::chrono::milliseconds longest) {
  const auto silence = net::link_silence(connection_->fd());
  if (silence && *silence > longest) {
    return close(Error(ErrorCode::PeerLost,
                       fmt::format("nothing has come from {} for {:.1f} s: the link is cut, or the host is down",
                                   peer(), std::chrono::duration<double>(*silence).count())));
  }
  link_ = Timer(loop_, std::chrono::milliseconds(100), [this, longest] { look_at_link(longest); });
}

void Channel::advance() {
  if (closed_) return;
  const auto moved = connection_->advance();
  // Messages that arrived before the connection's end still count.
  while (!closed_) {
    auto bytes = connection_->next_message();
    if (!bytes) break;
    auto message = decode(*bytes);
    if (!message) return close(message.error());
    on_message_(*std::move(message));
  }
  if (closed_) return;
  if (!moved) return close(moved.error());
  if (connection_->at_end()) return close(std::nullopt);
  update_interest();
}

void Channel::update_interest() {
  if (closed_) return;
  const bool wanted = connection_->wants_write();
  if (wanted == wants_write_) return;
  wants_write_ = wanted;
  if (wanted) {
    watch_.on_writable([this] { advance(); });
  } else {
    watch_.on_writable(nullptr);
  }
}

void Channel::close(std::optional<Error> error) {
  if (closed_) return;
  closed_ = true;
  begun_ = Timer();
  link_ = Timer();
  watch_ = Watch();
  connection_.reset();
  on_closed_(std::move(error));
}

}  // namespace cohort::launch
