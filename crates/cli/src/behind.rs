//! A file that another thread writes: where a disk stands still for a while, as one does that others keep busy, the
//! caller goes on.
//!
//! Invariants: what was handed over is written in order or not at all; after the first error nothing more is, and whoever
//! writes next is told of it.

use crate::control;
use std::io::{self, Write};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

/// How many writes may wait for the disk. A trace makes three for each 64 KiB: 64 MiB of it, some seconds of a million records each.
const WAITING: usize = 3 << 10;

/// The end that is written to. Gone when all was written, or when nothing more can be.
pub(crate) struct Behind(Option<Scribe>);

/// The thread that writes, and how bytes get there.
struct Scribe {
    bytes: SyncSender<Vec<u8>>,
    thread: JoinHandle<io::Result<()>>,
}

impl Behind {
    /// Begins to write to `file`.
    ///
    /// # Errors
    /// When no thread can be started.
    pub(crate) fn new(mut file: impl Write + Send + 'static) -> io::Result<Self> {
        let (bytes, to_write) = sync_channel::<Vec<u8>>(WAITING);
        let write = move || {
            to_write.iter().try_for_each(|bytes| file.write_all(&bytes))?;
            file.flush()
        };
        let thread = control::thread("trace-file").spawn(write)?;
        Ok(Self(Some(Scribe { bytes, thread })))
    }

    /// Waits until everything is written.
    ///
    /// # Errors
    /// When something could not be; also when that was told before.
    pub(crate) fn close(&mut self) -> io::Result<()> {
        let Some(Scribe { bytes, thread }) = self.0.take() else { return Err(io::ErrorKind::BrokenPipe.into()) };
        drop(bytes);
        thread.join().map_err(|_| io::Error::other("the thread that writes the file failed"))?
    }
}

impl Write for Behind {
    /// Waits only where as much as may wait does.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(scribe) = &self.0 else { return Err(io::ErrorKind::BrokenPipe.into()) };
        if scribe.bytes.send(bytes.to_vec()).is_err() {
            self.close()?;
        }
        Ok(bytes.len())
    }

    /// What was taken will be written: nothing is waited for.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, channel};

    /// Takes what is written each time that it is let.
    struct Slow(Receiver<io::Result<()>>, std::sync::mpsc::Sender<Vec<u8>>);

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.recv().expect("a word")?;
            self.1.send(bytes.to_vec()).expect("heard");
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_disk_that_stands_still_stops_nobody() {
        let (go, may) = channel();
        let (to, written) = channel();
        let mut file = Behind::new(Slow(may, to)).expect("a thread");
        // Far more than the disk takes, which nobody has let write yet.
        let parts: Vec<[u8; 3]> = (0..200).map(|nth| [nth; 3]).collect();
        parts.iter().for_each(|part| file.write_all(part).expect("taken"));
        file.flush().expect("taken");
        assert!(written.try_recv().is_err());
        (0..200).for_each(|_| go.send(Ok(())).expect("listened to"));
        file.close().expect("written");
        assert_eq!(written.iter().flatten().collect::<Vec<u8>>(), parts.concat());
    }

    #[test]
    fn a_disk_that_is_full_is_told_of() {
        let (go, may) = channel();
        let (to, written) = channel();
        let mut file = Behind::new(Slow(may, to)).expect("a thread");
        file.write_all(b"1").expect("taken");
        file.write_all(b"2").expect("taken");
        go.send(Ok(())).expect("listened to");
        go.send(Err(io::ErrorKind::StorageFull.into())).expect("listened to");
        assert_eq!(written.iter().flatten().collect::<Vec<u8>>(), b"1");
        assert_eq!(file.write(b"3").expect_err("no room").kind(), io::ErrorKind::StorageFull);
        assert!(file.write(b"4").is_err() && file.close().is_err());
    }

    #[test]
    fn an_error_is_told_of_at_the_end_at_the_latest() {
        let (go, may) = channel();
        let mut file = Behind::new(Slow(may, channel().0)).expect("a thread");
        file.write_all(b"1").expect("taken");
        go.send(Err(io::ErrorKind::StorageFull.into())).expect("listened to");
        assert_eq!(file.close().expect_err("no room").kind(), io::ErrorKind::StorageFull);
    }
}
