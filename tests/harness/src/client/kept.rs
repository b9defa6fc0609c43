//! A client that keeps its connection, as SDKs do, and never sends a request again.

use std::net::SocketAddr;

use super::{Connection, Reply, Request, Response};
use crate::{process::Log, within};

/// A client with at most one connection, which it uses for one request after the other.
#[derive(Debug)]
pub struct KeptClient {
    to: SocketAddr,
    connection: Option<Connection>,
    log: Log,
}

impl KeptClient {
    /// Creates a client of this address, which connects with its first request.
    #[must_use]
    pub fn new(to: SocketAddr) -> Self {
        Self { to, connection: None, log: Log::new("a client that keeps its connection") }
    }

    /// Sends a request, over a new connection only if the server has ended the kept one, and reads the whole response.
    ///
    /// # Errors
    /// If there is no response, or not all of it.
    pub async fn fetch(&mut self, request: Request) -> Result<Reply, String> {
        let log = self.log.clone();
        within("a whole response", &log, self.try_fetch(request)).await
    }

    async fn try_fetch(&mut self, request: Request) -> Result<Reply, String> {
        let mut connection = match self.kept().await {
            Some(connection) => connection,
            None => Connection::try_open(self.to, &self.log, &request).await.map_err(|error| format!("{error:?}"))?,
        };
        let is_about_the_program = request.hide_from(&self.log);
        let answer = connection.sender.send_request(request.into_hyper(connection.host)).await;
        let answer = answer.map_err(|error| format!("{error:?}"))?;
        let response = Response::new(answer, connection.driver.clone(), self.log.clone(), is_about_the_program);
        let reply = response.read_to_end().await;
        if reply.aborted {
            return Err(format!("a response broke off: {}", reply.text()));
        }
        self.connection = (reply.header("connection").as_deref() != Some("close")).then_some(connection);
        Ok(reply)
    }

    /// Takes the connection, if the server has not closed it.
    async fn kept(&mut self) -> Option<Connection> {
        let mut connection = self.connection.take()?;
        connection.sender.ready().await.is_ok().then_some(connection)
    }
}
