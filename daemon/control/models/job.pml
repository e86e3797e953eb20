/*
 * A job's life over two nodes: ranks attach, die and come again under the same name, daemons tell each other, proxies write
 * into the other node's memory, a stream between the daemons may break and come back. README.md maps it to the code.
 *
 * Each node has one rank, which may run twice; the second run may begin when the first has given up the name. The model
 * has no cycle: what must happen at last is asserted where nothing else can happen any more (`at_the_end`).
 *
 * -DBREAKS=n: how often the stream breaks. -DFEW_RUNS: only the rank of node 0 runs twice. -DM_...: mutants, each of which must fail (models.txt).
 */
#ifndef BREAKS
#define BREAKS 0
#endif
#ifdef FEW_RUNS
#define SECOND_RUN(n) ((n) == 0)
#else
#define SECOND_RUN(n) true
#endif
#define NOBODY 9

/* --- One run on one node: its client, its session, and the node's view of its job. [node * 2 + run] --- */
#define ABSENT 0
#define WAITING 1
#define UP 2
#define FAILED 3
byte session[4] = ABSENT;
bool mortal[4] = false;   /* the client may go at any time; otherwise it stays */
bool died[4] = false;     /* it is gone */
bool ending[4] = false;   /* Job::ending: the name is free */
bool bound[4] = false;    /* JobState::kBound */
bool writes[4] = false;   /* the proxy has the peer (BindPeer): it takes the client's commands */
bool fenced[4] = false;
bool drained[4] = false;
bool gone_sent[4] = false;
bool released[4] = false; /* memory, flags and slot are somebody else's now */
bool told[4] = false;     /* Job::told: the other daemon has our part (and Job::announced_to: here a stream that is lost is lost at once) */
byte part[4] = NOBODY;    /* Job::parts: which run of the other node it is with */
bool ready[4] = false;    /* RemotePart::ready, gone */
bool gone[4] = false;
byte flying[4] = 0;       /* writes of this run's proxy that the network has */
byte flies_in[4] = 0;     /* the stream's generation when the link they go over was made */

/* --- One node --- */
byte early[2] = NOBODY;   /* PeerState::early */
bool peer_up[2] = true;   /* PeerState::up */
byte seen[2] = 0;         /* the generation of the stream that this node knows of */
byte links[2] = 0;        /* of which generation its link is: LinkTable::on_peer_down() lets it go */
byte generation = 0;
byte breaks_left = BREAKS;

mtype = { PART, READY, LEFT, GONE, DOWN, HELLO };
chan wire[2] = [8] of { mtype, byte, byte }; /* to each node; in order, like a gRPC stream */

#define OTHER (1 - n)
#define RUN(i) ((i) % 2)
#define KNOWN(i) (session[i] != ABSENT && !released[i])
#define ACTIVE(i) (session[i] == WAITING || session[i] == UP)

/* A message to the other node: into the void when the stream has broken and nobody here knows yet. */
inline tell(what, whose, with) {
  if
  :: peer_up[n] && seen[n] == generation -> wire[OTHER]!what(whose, with)
  :: else
  fi
}

/* fail_job(), end_session(), fence() */
inline fail_job(i) {
  if
  :: ACTIVE(i) ->
    session[i] = FAILED;
    ending[i] = true;
    fenced[i] = true;
    writes[i] = false;
#ifndef M_END_NOT_TOLD
    if :: told[i] -> tell(LEFT, RUN(i), 0) :: else fi;
#endif
#ifdef M_GONE_BEFORE_DRAINED
    if :: told[i] -> tell(GONE, RUN(i), 0) :: else fi;
#endif
    skip
  :: else
  fi
}

#ifdef M_READY_NOT_AWAITED
#define READY_IN(i) true
#else
#define READY_IN(i) (ready[i])
#endif
/* advance(), bind(), job_up() */
inline advance(i) {
  if
  :: session[i] == WAITING && !bound[i] && part[i] != NOBODY && told[i] ->
    bound[i] = true;
#ifdef M_COMMANDS_BEFORE_UP
    writes[i] = true;
    flies_in[i] = seen[n];
#endif
    tell(READY, RUN(i), part[i])
  :: else
  fi;
  if
  :: session[i] == WAITING && bound[i] && READY_IN(i) ->
    session[i] = UP;
    writes[i] = true;
    flies_in[i] = seen[n]
  :: else
  fi
}
/* Whether run i of this node holds part `whose` of the other node. Two may: a part that had bound nothing when the stream
 * broke is announced again, and may then be the next job's while the last one that held it still drains. */
#ifdef M_PARTS_WITHOUT_IDENTITY
#define HOLDS(i, whose) (KNOWN(i) && part[i] != NOBODY && !ending[i])
#else
#define HOLDS(i, whose) (KNOWN(i) && part[i] == (whose))
#endif
/* job_with(): the newest that holds it */
inline find_job(whose) {
  job = NOBODY;
  if
  :: HOLDS(n * 2 + 1, whose) -> job = n * 2 + 1
  :: !HOLDS(n * 2 + 1, whose) && HOLDS(n * 2, whose) -> job = n * 2
  :: else
  fi
}
/* The job that has the name here: by_name_. */
inline find_name() {
  job = NOBODY;
  if
  :: KNOWN(n * 2) && !ending[n * 2] -> job = n * 2
  :: KNOWN(n * 2 + 1) && !ending[n * 2 + 1] -> job = n * 2 + 1
  :: else
  fi
}

inline announce(i) {
  if
  :: peer_up[n] && !told[i] -> tell(PART, RUN(i), 0); told[i] = true
  :: else
  fi
}

inline attach(i) {
  if :: mortal[i] = true :: true fi;
  session[i] = WAITING;
  announce(i);
  if
  :: early[n] != NOBODY -> part[i] = early[n]; early[n] = NOBODY
  :: else
  fi;
  advance(i)
}

/* peer_down() for one job */
inline lose_peer(i) {
  if
  :: KNOWN(i) ->
    told[i] = false;
    if
    :: part[i] == NOBODY
    :: part[i] != NOBODY && session[i] == WAITING && !bound[i] -> part[i] = NOBODY; ready[i] = false
    :: else -> gone[i] = true; fail_job(i)
    fi
  :: else
  fi
}

/* on_drained() */
inline drain(i) {
  drained[i] = true;
  gone_sent[i] = true;
#if !defined(M_GONE_BEFORE_DRAINED) && !defined(M_END_NOT_TOLD)
  if :: told[i] -> tell(GONE, RUN(i), 0) :: else fi
#endif
}

#define MEMORY_FREE(i) (part[i] == NOBODY || gone[i]) /* Job::remote_gone() */

#ifdef M_RELEASED_WHILE_PEER_WRITES
#define RELEASABLE(i) true
#else
#define RELEASABLE(i) MEMORY_FREE(i)
#endif
#define CLIENT_AND_SESSION(i) \
  :: atomic { fenced[i] && !drained[i] && flying[i] == 0 -> drain(i) } \
  :: atomic { drained[i] && !released[i] && RELEASABLE(i) -> released[i] = true } \
  :: atomic { session[i] != ABSENT && mortal[i] && !died[i] -> died[i] = true; fail_job(i) }
#ifdef M_END_REACHES_ONE_JOB
#define ALSO !HOLDS(n * 2, theirs)
#else
#define ALSO true
#endif
#ifdef M_READY_FOR_ANYBODY
#define READY_FOR(i) true
#else
#define READY_FOR(i) (RUN(i) == ours) /* the other is ready with this part of ours, not with one before */
#endif

/* The control thread of one node. */
proctype control(byte n) {
  byte job, theirs, ours;
end:
  do
  /* A rank attaches; the second one when the first has given up the name. */
  :: atomic { session[n * 2] == ABSENT -> attach(n * 2) }
  :: atomic { SECOND_RUN(n) && session[n * 2 + 1] == ABSENT && ending[n * 2] -> attach(n * 2 + 1) }
  CLIENT_AND_SESSION(n * 2)
  CLIENT_AND_SESSION(n * 2 + 1)
  :: atomic { wire[n]?PART(theirs, _) ->
      find_name();
      if
      :: job != NOBODY && part[job] == theirs
      :: job != NOBODY && session[job] == WAITING && !bound[job] && part[job] == NOBODY -> part[job] = theirs; advance(job)
#ifdef M_EARLY_PART_DROPPED
      :: else
#else
      :: else -> early[n] = theirs
#endif
      fi;
      job = 0; theirs = 0 }
  :: atomic { wire[n]?READY(theirs, ours) ->
      find_job(theirs);
      if :: job != NOBODY && READY_FOR(job) -> ready[job] = true; advance(job) :: else fi;
      job = 0; theirs = 0; ours = 0 }
  :: atomic { wire[n]?LEFT(theirs, _) ->
      if :: early[n] == theirs -> early[n] = NOBODY :: else fi;
      if :: HOLDS(n * 2, theirs) -> fail_job(n * 2) :: else fi;
      if :: ALSO && HOLDS(n * 2 + 1, theirs) -> fail_job(n * 2 + 1) :: else fi;
      theirs = 0 }
  :: atomic { wire[n]?GONE(theirs, _) ->
      if :: early[n] == theirs -> early[n] = NOBODY :: else fi;
      if :: HOLDS(n * 2, theirs) -> gone[n * 2] = true; fail_job(n * 2) :: else fi;
      if :: ALSO && HOLDS(n * 2 + 1, theirs) -> gone[n * 2 + 1] = true; fail_job(n * 2 + 1) :: else fi;
      theirs = 0 }
  :: atomic { wire[n]?DOWN(theirs, _) ->
      peer_up[n] = false;
      links[n] = NOBODY;
      early[n] = NOBODY;
      lose_peer(n * 2);
      lose_peer(n * 2 + 1);
      theirs = 0 }
  :: atomic { wire[n]?HELLO(theirs, _) ->
      peer_up[n] = true;
      seen[n] = theirs;
      links[n] = theirs;
#ifndef M_NOT_ANNOUNCED_AGAIN
      find_name();
      if :: job != NOBODY && session[job] == WAITING && !bound[job] -> announce(job); advance(job) :: else fi;
#endif
      job = 0; theirs = 0 }
  od
}

/* The network: a client commits a command at any time, the proxy posts it, it lands whenever it likes. */
#define TARGET(n, i) ((1 - (n)) * 2 + part[i])
#define MOVES(n, i) \
  :: atomic { writes[i] && !died[i] && flying[i] == 0 -> flying[i] = 1 } \
  :: atomic { flying[i] != 0 -> \
      /* A write over a link that its receiver has let go is refused by the fabric. */ \
      assert(flies_in[i] != links[1 - (n)] || !released[TARGET(n, i)]); \
      flying[i] = 0 }
active proctype network() {
end:
  do
  MOVES(0, 0)
  MOVES(0, 1)
  MOVES(1, 2)
  MOVES(1, 3)
  od
}

/* The stream between the daemons breaks: what was on its way is lost, or not. */
active proctype stream() {
end:
  do
  :: atomic { breaks_left > 0 && peer_up[0] && peer_up[1] && seen[0] == generation && seen[1] == generation ->
      breaks_left--;
      generation++;
      if
      :: do :: wire[0]?_, _, _ :: empty(wire[0]) -> break od
      :: true
      fi;
      if
      :: do :: wire[1]?_, _, _ :: empty(wire[1]) -> break od
      :: true
      fi;
      wire[0]!DOWN(0, 0); wire[0]!HELLO(generation, 0);
      wire[1]!DOWN(0, 0); wire[1]!HELLO(generation, 0) }
  od
}

#define SETTLED(i) (session[i] == ABSENT || session[i] == UP || released[i] || session[i] == WAITING)
#define WITH_LIVING_PEER(n, i) (session[i] != UP || (part[i] != NOBODY && session[TARGET(n, i)] == UP && part[TARGET(n, i)] == RUN(i)))
active proctype at_the_end() {
  timeout ->
  /* Nothing is held for ever: who has failed has given everything back. */
  assert(SETTLED(0) && SETTLED(1) && SETTLED(2) && SETTLED(3));
  /* Who lost its peer knows it. */
  assert(WITH_LIVING_PEER(0, 0) && WITH_LIVING_PEER(0, 1) && WITH_LIVING_PEER(1, 2) && WITH_LIVING_PEER(1, 3));
  /* Two ranks that wait for each other find each other. */
  assert(!((session[0] == WAITING || session[1] == WAITING) && (session[2] == WAITING || session[3] == WAITING)))
}

init {
  atomic { run control(0); run control(1) }
}
