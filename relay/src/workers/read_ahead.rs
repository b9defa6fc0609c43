//! Reads a socket in few system calls, for a reader that requests few bytes at a time.
//!
//! tungstenite reads up to 14 bytes for a frame's header, then the rest of its payload: without this, each token of a
//! stream would cost two system calls, although one can return many tokens. tokio's `BufReader` would do, but holds its
//! buffer as long as the socket lives, and most workers are idle most of the time. This one holds only bytes that have
//! been read but not requested yet.

use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The maximum size of one read call: some 60 tokens.
const READ_AHEAD_BYTES: usize = 16 << 10;

/// A stream that reads ahead; writes pass through.
#[derive(Debug)]
pub struct ReadAhead<S> {
    inner: S,
    unread: Bytes,
}

impl<S> ReadAhead<S> {
    /// Reads ahead from `inner`.
    pub fn new(inner: S) -> Self {
        Self { inner, unread: Bytes::new() }
    }

    fn take_unread(&mut self, buf: &mut ReadBuf<'_>) {
        let len = self.unread.len().min(buf.remaining());
        buf.put_slice(&self.unread[..len]);
        self.unread.advance(len);
        if self.unread.is_empty() {
            self.unread = Bytes::new();
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ReadAhead<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if !self.unread.is_empty() {
            self.take_unread(buf);
            return Poll::Ready(Ok(()));
        }
        let mut space = [MaybeUninit::uninit(); READ_AHEAD_BYTES];
        let mut ahead = ReadBuf::uninit(&mut space);
        ready!(Pin::new(&mut self.inner).poll_read(cx, &mut ahead))?;
        let (first, rest) = ahead.filled().split_at(ahead.filled().len().min(buf.remaining()));
        buf.put_slice(first);
        if !rest.is_empty() {
            self.unread = Bytes::copy_from_slice(rest);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ReadAhead<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// Counts the reads that return bytes, because each is a system call.
    struct Calls<S> {
        inner: S,
        calls: usize,
    }

    impl<S: AsyncRead + Unpin> AsyncRead for Calls<S> {
        fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            ready!(Pin::new(&mut self.inner).poll_read(cx, buf))?;
            self.calls += 1;
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test]
    async fn small_reads_are_served_from_one_large_read() {
        let (mut peer, ours) = tokio::io::duplex(1 << 20);
        let sent: Vec<u8> = (0..10_000_u32).flat_map(u32::to_be_bytes).collect();
        peer.write_all(&sent).await.unwrap();
        drop(peer);
        let mut reader = ReadAhead::new(Calls { inner: ours, calls: 0 });
        let mut got = Vec::new();
        let mut part = [0; 14];
        loop {
            let len = reader.read(&mut part).await.unwrap();
            if len == 0 {
                break;
            }
            got.extend_from_slice(&part[..len]);
        }
        assert!(got == sent);
        // 40,000 bytes, then the end.
        assert_eq!(reader.inner.calls, 4);
        assert_eq!(reader.unread.len(), 0);
    }
}
