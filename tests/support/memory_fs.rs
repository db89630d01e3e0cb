//! A disk in memory that knows what is durable and what is only seen, can fail or stop at any
//! operation, and can take turns between workers.

use std::collections::BTreeMap;
use std::fmt::{self, Debug};
use std::io::{self, ErrorKind};
use std::path::{Component, Path};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use kdscore::store::Bytes;
use kdscore::store::fs::{FolderEntry, Fs, Held, NewFile};

use super::mix;

/// What a power loss or a kill does to what was not synced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Crash {
    /// The process died, the machine did not: everything seen is there.
    Kept,
    /// Nothing that was not synced is there.
    Lost,
    /// Names are there, contents that were not synced are not.
    NamesKept,
    /// Contents are there, names that were not synced are not.
    DataKept,
    /// Each name and each file one way or the other.
    Mixed(u64),
}

/// What goes wrong, at which operation, counted from 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    None,
    /// This operation fails, the next ones work.
    Fail(usize, ErrorKind),
    /// From this operation on nothing can be written any more.
    FullFrom(usize),
    /// Nothing happens from this operation on: the process is gone.
    Stop(usize),
}

/// Contents, or names; each as seen by processes and as it would survive a power loss.
#[derive(Clone)]
enum Node {
    File {
        seen: Vec<u8>,
        durable: Vec<u8>,
    },
    Folder {
        seen: BTreeMap<String, usize>,
        durable: BTreeMap<String, usize>,
    },
}

/// All that lies on the disk. Node 0 is the root.
#[derive(Clone)]
struct Disk {
    nodes: Vec<Node>,
    unique: u64,
}

/// One worker's view of the disk, with its own faults and turns.
#[derive(Clone)]
pub struct MemoryFs {
    disk: Arc<Mutex<Disk>>,
    worker: Arc<Mutex<Worker>>,
    turns: Option<(Arc<Turns>, usize)>,
}

struct Worker {
    fault: Fault,
    operations: usize,
    renames_new: bool,
}

/// What an operation may do.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Go,
    /// A write gets half of its bytes down first.
    Refuse(ErrorKind),
}

impl Debug for MemoryFs {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("MemoryFs")
    }
}

impl MemoryFs {
    /// An empty disk; `renames_new` says whether it can rename without replacing.
    pub fn new(renames_new: bool) -> MemoryFs {
        let root = Node::Folder {
            seen: BTreeMap::new(),
            durable: BTreeMap::new(),
        };
        MemoryFs {
            disk: Arc::new(Mutex::new(Disk {
                nodes: vec![root],
                unique: 0,
            })),
            worker: Arc::new(Mutex::new(Worker {
                fault: Fault::None,
                operations: 0,
                renames_new,
            })),
            turns: None,
        }
    }

    /// The same disk for another worker, with its own faults.
    pub fn worker(&self, fault: Fault) -> MemoryFs {
        let renames_new = self.worker.lock().unwrap().renames_new;
        MemoryFs {
            disk: self.disk.clone(),
            worker: Arc::new(Mutex::new(Worker {
                fault,
                operations: 0,
                renames_new,
            })),
            turns: None,
        }
    }

    /// The same disk for a worker that waits for its turns.
    pub fn taking_turns(&self, turns: &Arc<Turns>, worker: usize) -> MemoryFs {
        let mut fs = self.worker(Fault::None);
        fs.turns = Some((turns.clone(), worker));
        fs
    }

    /// Operations this worker has asked for.
    pub fn operations(&self) -> usize {
        self.worker.lock().unwrap().operations
    }

    /// The disk after a crash, for new workers.
    pub fn after(&self, crash: Crash) -> MemoryFs {
        let fs = self.worker(Fault::None);
        let mut disk = self.disk.lock().unwrap().clone();
        disk.crash(crash);
        MemoryFs {
            disk: Arc::new(Mutex::new(disk)),
            ..fs
        }
    }

    /// Every file by path, and every empty folder.
    pub fn tree(&self) -> BTreeMap<String, Vec<u8>> {
        let disk = self.disk.lock().unwrap();
        let mut out = BTreeMap::new();
        disk.tree_into(0, "", &mut out);
        out
    }

    fn step(&self) -> Verdict {
        if let Some((turns, worker)) = &self.turns {
            turns.wait_for(*worker);
        }
        let mut worker = self.worker.lock().unwrap();
        let at = worker.operations;
        worker.operations += 1;
        match worker.fault {
            Fault::Fail(n, kind) if at == n => Verdict::Refuse(kind),
            Fault::FullFrom(n) if at >= n => Verdict::Refuse(ErrorKind::StorageFull),
            Fault::Stop(n) if at >= n => Verdict::Refuse(ErrorKind::Other),
            _ => Verdict::Go,
        }
    }

    /// An operation that needs no room on the disk.
    fn enter(&self) -> io::Result<MutexGuard<'_, Disk>> {
        match self.step() {
            Verdict::Refuse(ErrorKind::StorageFull) | Verdict::Go => Ok(self.disk.lock().unwrap()),
            Verdict::Refuse(kind) => Err(kind.into()),
        }
    }

    fn enter_writing(&self) -> io::Result<MutexGuard<'_, Disk>> {
        match self.step() {
            Verdict::Go => Ok(self.disk.lock().unwrap()),
            Verdict::Refuse(kind) => Err(kind.into()),
        }
    }
}

impl Disk {
    fn folder(&mut self, at: usize) -> io::Result<&mut BTreeMap<String, usize>> {
        match &mut self.nodes[at] {
            Node::Folder { seen, .. } => Ok(seen),
            Node::File { .. } => Err(ErrorKind::NotADirectory.into()),
        }
    }

    fn find(&mut self, path: &Path) -> io::Result<usize> {
        let mut at = 0;
        for part in path.components() {
            if let Component::Normal(name) = part {
                let name = name.to_str().unwrap();
                at = *self.folder(at)?.get(name).ok_or(ErrorKind::NotFound)?;
            }
        }
        Ok(at)
    }

    /// The folder that holds `path`, and its name in it.
    fn split(&mut self, path: &Path) -> io::Result<(usize, String)> {
        let folder = self.find(path.parent().unwrap())?;
        let name = path.file_name().unwrap().to_str().unwrap();
        Ok((folder, name.to_owned()))
    }

    fn add(&mut self, path: &Path, node: Node) -> io::Result<usize> {
        let (folder, name) = self.split(path)?;
        if self.folder(folder)?.contains_key(&name) {
            return Err(ErrorKind::AlreadyExists.into());
        }
        self.nodes.push(node);
        let at = self.nodes.len() - 1;
        self.folder(folder)?.insert(name, at);
        Ok(at)
    }

    fn link(&mut self, from: &Path, to: &Path, replace: bool) -> io::Result<()> {
        let node = self.find(from)?;
        let (folder, name) = self.split(to)?;
        let target = self.folder(folder)?.get(&name).copied();
        if let Some(target) = target {
            let is_empty =
                matches!(&self.nodes[target], Node::Folder { seen, .. } if seen.is_empty());
            match &self.nodes[target] {
                _ if !replace => return Err(ErrorKind::AlreadyExists.into()),
                Node::Folder { .. } if !is_empty => {
                    return Err(ErrorKind::DirectoryNotEmpty.into());
                }
                _ => {}
            }
        }
        self.folder(folder)?.insert(name, node);
        Ok(())
    }

    fn unlink(&mut self, path: &Path) -> io::Result<()> {
        let (folder, name) = self.split(path)?;
        let removed = self.folder(folder)?.remove(&name);
        removed.map(drop).ok_or_else(|| ErrorKind::NotFound.into())
    }

    fn crash(&mut self, crash: Crash) {
        for (at, node) in self.nodes.iter_mut().enumerate() {
            match node {
                Node::File { seen, durable } => {
                    let keep = match crash {
                        Crash::Kept | Crash::DataKept => true,
                        Crash::Lost | Crash::NamesKept => false,
                        Crash::Mixed(seed) => mix(seed ^ at as u64) & 1 == 0,
                    };
                    if !keep {
                        seen.clone_from(durable);
                    }
                    durable.clone_from(seen);
                }
                Node::Folder { seen, durable } => {
                    let names: Vec<String> = seen.keys().chain(durable.keys()).cloned().collect();
                    for name in names {
                        let keep = match crash {
                            Crash::Kept | Crash::NamesKept => true,
                            Crash::Lost | Crash::DataKept => false,
                            Crash::Mixed(seed) => {
                                let text =
                                    name.bytes().fold(at as u64, |h, b| mix(h ^ u64::from(b)));
                                mix(seed ^ text) & 1 == 0
                            }
                        };
                        let source = if keep { &*seen } else { &*durable };
                        match source.get(&name).copied() {
                            Some(node) => seen.insert(name, node),
                            None => seen.remove(&name),
                        };
                    }
                    durable.clone_from(seen);
                }
            }
        }
    }

    fn tree_into(&self, at: usize, path: &str, out: &mut BTreeMap<String, Vec<u8>>) {
        match &self.nodes[at] {
            Node::File { seen, .. } => {
                out.insert(path.to_owned(), seen.clone());
            }
            Node::Folder { seen, .. } => {
                if seen.is_empty() {
                    out.insert(format!("{path}/"), Vec::new());
                }
                for (name, &node) in seen {
                    self.tree_into(node, &format!("{path}/{name}"), out);
                }
            }
        }
    }
}

impl Fs for MemoryFs {
    fn unique(&self) -> String {
        let mut disk = self.disk.lock().unwrap();
        disk.unique += 1;
        disk.unique.to_string()
    }

    fn make_folder(&self, path: &Path) -> io::Result<()> {
        let mut disk = self.enter_writing()?;
        let folder = Node::Folder {
            seen: BTreeMap::new(),
            durable: BTreeMap::new(),
        };
        match disk.add(path, folder) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(()),
            other => other.map(drop),
        }
    }

    fn create_new(&self, path: &Path) -> io::Result<Box<dyn NewFile>> {
        let mut disk = self.enter_writing()?;
        let file = Node::File {
            seen: Vec::new(),
            durable: Vec::new(),
        };
        let node = disk.add(path, file)?;
        drop(disk);
        Ok(Box::new(OpenFile {
            fs: self.clone(),
            node,
        }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut disk = self.enter_writing()?;
        disk.link(from, to, true)?;
        disk.unlink(from)
    }

    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut disk = self.enter_writing()?;
        if !self.worker.lock().unwrap().renames_new {
            return Err(ErrorKind::Unsupported.into());
        }
        disk.link(from, to, false)?;
        disk.unlink(from)
    }

    fn hard_link(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.enter_writing()?.link(from, to, false)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        let mut disk = self.enter()?;
        let at = disk.find(path)?;
        match &mut disk.nodes[at] {
            Node::Folder { seen, durable } => durable.clone_from(seen),
            Node::File { .. } => return Err(ErrorKind::NotADirectory.into()),
        }
        Ok(())
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.enter()?.unlink(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        let mut disk = self.enter()?;
        let at = disk.find(path)?;
        if !disk.folder(at)?.is_empty() {
            return Err(ErrorKind::DirectoryNotEmpty.into());
        }
        disk.unlink(path)
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<FolderEntry>> {
        let mut disk = self.enter()?;
        let at = disk.find(folder)?;
        let entries = disk.folder(at)?.clone();
        let entry = |(name, node): (String, usize)| match &disk.nodes[node] {
            Node::File { seen, .. } => FolderEntry {
                name,
                is_folder: false,
                bytes: seen.len() as u64,
            },
            Node::Folder { .. } => FolderEntry {
                name,
                is_folder: true,
                bytes: 0,
            },
        };
        Ok(entries.into_iter().map(entry).collect())
    }

    fn open(&self, path: &Path) -> io::Result<Bytes> {
        let mut disk = self.enter()?;
        let at = disk.find(path)?;
        match &disk.nodes[at] {
            Node::File { seen, .. } => Ok(Bytes::owned(seen)),
            Node::Folder { .. } => Err(ErrorKind::IsADirectory.into()),
        }
    }

    fn hold(&self, _: &Path) -> io::Result<Held> {
        Ok(Held::default())
    }

    fn is_held(&self, _: &Path) -> io::Result<bool> {
        Ok(false)
    }

    fn append(&self, _path: &Path, _bytes: &[u8]) -> io::Result<()> {
        Err(ErrorKind::Unsupported.into())
    }
}

struct OpenFile {
    fs: MemoryFs,
    node: usize,
}

impl NewFile for OpenFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let verdict = self.fs.step();
        let mut disk = self.fs.disk.lock().unwrap();
        let Node::File { seen, .. } = &mut disk.nodes[self.node] else {
            return Err(ErrorKind::IsADirectory.into());
        };
        match verdict {
            Verdict::Go => {
                seen.extend(bytes);
                Ok(())
            }
            Verdict::Refuse(kind) => {
                seen.extend(&bytes[..bytes.len() / 2]);
                Err(kind.into())
            }
        }
    }

    fn sync(&mut self) -> io::Result<()> {
        let mut disk = self.fs.enter()?;
        if let Node::File { seen, durable } = &mut disk.nodes[self.node] {
            durable.clone_from(seen);
        }
        Ok(())
    }
}

/// Who may run, and for how many operations: phases one after the other, each of one worker.
#[derive(Debug)]
pub struct Turns {
    state: Mutex<TurnState>,
    changed: Condvar,
}

#[derive(Debug)]
struct TurnState {
    /// (worker, operations left), the current one first.
    phases: Vec<(usize, usize)>,
    finished: Vec<usize>,
}

impl Turns {
    /// After the last phase everybody may run who is left, in the order of `phases`.
    pub fn new(phases: &[(usize, usize)]) -> Arc<Turns> {
        Arc::new(Turns {
            state: Mutex::new(TurnState {
                phases: phases.to_vec(),
                finished: Vec::new(),
            }),
            changed: Condvar::new(),
        })
    }

    fn wait_for(&self, worker: usize) {
        let mut state = self.state.lock().unwrap();
        loop {
            state.skip();
            match state.phases.first_mut() {
                Some((whose, left)) if *whose == worker => {
                    *left -= 1;
                    self.changed.notify_all();
                    return;
                }
                Some(_) => state = self.changed.wait(state).unwrap(),
                None => return,
            }
        }
    }

    /// The worker has no more operations: its turns are over.
    pub fn finish(&self, worker: usize) {
        let mut state = self.state.lock().unwrap();
        state.finished.push(worker);
        state.skip();
        self.changed.notify_all();
    }
}

impl TurnState {
    fn skip(&mut self) {
        let TurnState { phases, finished } = self;
        while phases
            .first()
            .is_some_and(|(worker, left)| *left == 0 || finished.contains(worker))
        {
            phases.remove(0);
        }
    }
}
