//! Both programs' system calls, recorded by strace: options of their sockets, the number of writes, and no activity
//! while idle.

mod batches;
mod idle;
mod nodelay;

use modelrelay_harness::trace::{Call, Trace};
use modelrelay_harness::{TEST_TIMEOUT, poll_for};

/// The calls that create, configure, use and close sockets.
const SOCKETS: &str = "socket,accept4,connect,setsockopt,write,writev,sendto,sendmsg,close";

/// Waits until `wanted` finds something in the record: strace writes asynchronously, with a short delay.
async fn recorded<T>(trace: &Trace, what: &str, wanted: impl Fn(&[Call]) -> Option<T>) -> T {
    let found = poll_for(TEST_TIMEOUT, async || wanted(&trace.calls())).await;
    found.unwrap_or_else(|| panic!("the trace does not show: {what}"))
}

/// Returns the number of sends over the connection that first sent data with `mark` in it, from that send until its
/// close or the end.
fn sends_from(calls: &[Call], mark: &str) -> Option<usize> {
    let first = calls.iter().position(|call| call.is_send() && call.args.contains(mark))?;
    let fd = calls[first].fd();
    let of_connection = calls[first..].iter().filter(|call| call.fd() == fd);
    Some(of_connection.take_while(|call| call.name != "close").filter(|call| call.is_send()).count())
}
