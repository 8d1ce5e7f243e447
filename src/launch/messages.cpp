#include "launch/messages.h"

#include "base/records.h"

namespace cohort::launch {

// One list of fields per message serves both directions (base/records.h).
template <class M, class A>
void visit_fields(M& m, A& a, const Hello*) {
  a(m.protocol, m.version, m.host_index, m.host, m.pid, m.cores, m.free_port, m.build, m.nodes, m.ranks, m.nodes_id,
    m.devices);
}
template <class M, class A>
void visit_fields(M& m, A& a, const Started*) {
  a(m.pids, m.threads);
}
template <class M, class A>
void visit_fields(M& m, A& a, const StartFailed*) {
  a(m.rank, m.reason);
}
template <class M, class A>
void visit_fields(M& m, A& a, const Output*) {
  a(m.rank, codec::below(m.stream, 2, "there is no such stream"), m.bytes);
}
template <class M, class A>
void visit_fields(M& m, A& a, const Exited*) {
  a(m.rank, m.status.code, m.status.signal, m.status.core_dumped, m.before_stop, m.out_of_memory, m.after_ns,
    m.last_stderr, m.last, m.words, m.cause);
}
template <class M, class A>
void visit_fields(M& m, A& a, const CauseReport*) {
  a(m.code, m.rank, m.peer, m.sequence, m.host, m.operation);
}
template <class M, class A>
void visit_fields(M& m, A& a, const GroupReport*) {
  a(m.id, m.rank, m.size, m.begun, m.ended, m.operation, m.waiting, m.waited_ns, m.longest_ns, m.longest_number,
    m.message, m.peer, m.message_number);
}
template <class M, class A>
void visit_fields(M& m, A& a, const NamedReport*) {
  a(m.waiting, m.name, m.ended);
}
template <class M, class A>
void visit_fields(M& m, A& a, const TimesReport*) {
  a(m.steps, m.steps_ns, m.operations, m.bytes, m.busy_ns, m.waited_ns, m.wire_ns, m.wire_bytes, m.exposed_ns);
}
template <class M, class A>
void visit_fields(M& m, A& a, const RankReport*) {
  a(m.rank, m.pid, m.joined, m.joining, m.worlds, m.state, m.cpu_ms, m.memory, m.step, m.samples, m.exposed_ns,
    m.not_finite, m.not_finite_step, m.tells_stacks, m.saves_when_asked, m.preempted_by, m.groups, m.named, m.times);
}
template <class M, class A>
void visit_fields(M& m, A& a, const Reports*) {
  a(m.ranks);
}
template <class M, class A>
void visit_fields(M& m, A& a, const Stacks*) {
  a(m.rank, m.text);
}
template <class M, class A>
void visit_fields(M&, A& a, const AskStacks*) {
  a();
}
template <class M, class A>
void visit_fields(M& m, A& a, const InputTaken*) {
  a(m.bytes);
}
template <class M, class A>
void visit_fields(M& m, A& a, const Trouble*) {
  a(m.text);
}
template <class M, class A>
void visit_fields(M& m, A& a, const AllGone*) {
  a(m.swept, m.stuck);
}
template <class M, class A>
void visit_fields(M& m, A& a, const Ends*) {
  a(m.why);
}
template <class M, class A>
void visit_fields(M& m, A& a, const Told*) {
  a(m.signal);
}
template <class M, class A>
void visit_fields(M& m, A& a, const Refused*) {
  a(m.why);
}
template <class M, class A>
void visit_fields(M& m, A& a, const WorkerPlan*) {
  a(m.rank, m.environment, codec::below(m.role, 3, "there is no such role"), m.number);
}
template <class M, class A>
void visit_fields(M& m, A& a, const RoleProgram*) {
  a(codec::below(m.role, 3, "there is no such role"), m.path, m.arguments);
}
template <class M, class A>
void visit_fields(M& m, A& a, const StartJob*) {
  a(m.path, m.arguments, m.environment, m.folder, m.log_folder, m.workers, m.input, m.tail_lines, m.open_files,
    m.bind_to_cores, m.elsewhere, m.run_folder, m.divides_cores, m.trace, m.programs, m.servers_again, m.ignored);
}
template <class M, class A>
void visit_fields(M& m, A& a, const StartedAgain*) {
  a(m.rank, m.pid, m.why);
}
template <class M, class A>
void visit_fields(M& m, A& a, const StartAgain*) {
  a(m.rank, m.environment);
}
template <class M, class A>
void visit_fields(M& m, A& a, const GoOnWithout*) {
  a(m.rank);
}
template <class M, class A>
void visit_fields(M& m, A& a, const Input*) {
  a(m.bytes);
}
template <class M, class A>
void visit_fields(M& m, A& a, const OutputTaken*) {
  a(m.bytes);
}
template <class M, class A>
void visit_fields(M& m, A& a, const SignalWorkers*) {
  a(m.signal);
}
template <class M, class A>
void visit_fields(M& m, A& a, const StopWorkers*) {
  a(m.signal, m.grace_ms, m.saving_ms, codec::below(m.role, 3, "there is no such role"));
}
template <class M, class A>
void visit_fields(M& m, A& a, const TracePiece*) {
  a(m.base_ns, m.packets);
}
template <class M, class A>
void visit_fields(M& m, A& a, const ClockAnswer*) {
  a(m.number, m.now_ns);
}
template <class M, class A>
void visit_fields(M& m, A& a, const ClockQuestion*) {
  a(m.number);
}
template <class M, class A>
void visit_fields(M& m, A& a, const LeasedPorts*) {
  a(codec::most(m.ports, 65536), m.why);
}
template <class M, class A>
void visit_fields(M& m, A& a, const LeasePorts*) {
  a(m.count);
}
template <class M, class A>
void visit_fields(M& m, A& a, const Finish*) {
  a(m.status);
}

std::string encode(const Message& message) { return codec::encode(message); }

Result<Message> decode(std::string_view bytes) {
  if (bytes.empty()) return fail(ErrorCode::Corrupt, "empty message");
  return codec::decode<Message>(bytes, {.longest_text = kLongestMessage, .most_elements = kLongestMessage});
}

}  // namespace cohort::launch
