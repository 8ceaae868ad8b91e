"""What Redis runs for a history, in Lua: each script is one step that no other client sees half of.

Keys, all with one prefix:

  documents:NAMESPACE  a stream, one entry per document: tokens, checksum, writer
  births               namespace -> random bytes of its first write, so that readers notice a namespace that was dropped
                       and written again
  sizes                namespaces by the bytes that they are charged
  used                 namespaces by the number of the last batch that wrote to them
  totals               bytes charged, bytes of names, documents, batches
"""

DOCUMENT_BYTES = 128  # charged for an entry besides its tokens: about what Redis takes
NAMESPACE_BYTES = 5120  # charged for a namespace besides four times its name: Redis starts a stream with 4096
SAME = 128  # newest documents of a namespace that a new one is compared with: twice the largest batch

_COMMON = """
local prefix = KEYS[1]
local births, sizes, used, totals = prefix .. 'births', prefix .. 'sizes', prefix .. 'used', prefix .. 'totals'

local function stream(name) return prefix .. 'documents:' .. name end

local function count(what, number) redis.call('HINCRBY', totals, what, string.format('%d', number)) end

local function charge(name, bytes, documents)
  redis.call('ZINCRBY', sizes, bytes, name)
  count('bytes', bytes)
  count('documents', documents)
end

local function forget(name)
  charge(name, -tonumber(redis.call('ZSCORE', sizes, name) or '0'), -redis.call('XLEN', stream(name)))
  redis.call('UNLINK', stream(name))
  count('names', -#name * redis.call('HDEL', births, name))
  redis.call('ZREM', sizes, name)
  redis.call('ZREM', used, name)
end
"""

# ARGV: namespaces.
DROP = (
    _COMMON
    + """
for _, name in ipairs(ARGV) do forget(name) end
"""
)

# ARGV: writer, birth of namespaces that are new, limit of bytes, how many namespaces are not evicted whole, the one
# that is not evicted at all while it has less than half; then namespace, tokens and checksum of each document.
WRITE = (
    _COMMON
    + f"""
local document_bytes, namespace_bytes, same = {DOCUMENT_BYTES}, {NAMESPACE_BYTES}, {SAME}
"""
    + """
local writer, birth, limit, active, protected = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local newest = {}

-- A writer that heard no answer writes again, and a request that was repeated on another server is written by both.
local function is_new(name, tokens)
  if not newest[name] then
    newest[name] = {}
    for _, entry in ipairs(redis.call('XREVRANGE', stream(name), '+', '-', 'COUNT', same)) do
      newest[name][entry[2][2]] = true
    end
  end
  if newest[name][tokens] then return false end
  newest[name][tokens] = true
  return true
end

local function add(name, tokens, checksum)
  if redis.call('HSETNX', births, name, birth) == 1 then
    charge(name, namespace_bytes + 4 * #name, 0)
    count('names', #name)
  end
  redis.call('XADD', stream(name), '*', 't', tokens, 'c', checksum, 'w', writer)
  charge(name, #tokens + document_bytes, 1)
end

local function total() return tonumber(redis.call('HGET', totals, 'bytes') or '0') end

local function first_evictable(names, may_shrink)
  for number = 1, #names, 2 do
    local name, score = names[number], tonumber(names[number + 1])
    if name ~= protected or (may_shrink and 2 * score > limit) then return name end
  end
end

local function lose_oldest(name, excess)
  local entries, freed, last = redis.call('XRANGE', stream(name), '-', '+', 'COUNT', 17), 0, 0
  if #entries < 2 then forget(name) return end
  while last + 1 < #entries and freed < excess do
    last = last + 1
    freed = freed + #entries[last][2][2] + document_bytes
  end
  redis.call('XTRIM', stream(name), 'MINID', entries[last + 1][1])
  charge(name, -freed, -last)
end

-- Least recently written namespaces go first, until only the active ones are left. Then the largest lose their oldest
-- documents, so that a namespace that writes a lot evicts its own documents and not those of others.
local function evict()
  if total() <= limit then return end
  local goal = limit - limit / 64
  while total() > goal and redis.call('ZCARD', used) > active do
    forget(first_evictable(redis.call('ZRANGE', used, 0, 1, 'WITHSCORES'), false))
  end
  while total() > goal do
    local name = first_evictable(redis.call('ZREVRANGE', sizes, 0, 1, 'WITHSCORES'), true)
    if not name then return end
    lose_oldest(name, total() - goal)
  end
end

local batch = redis.call('HINCRBY', totals, 'batches', 1)
for number = 6, #ARGV, 3 do
  local name, tokens, checksum = ARGV[number], ARGV[number + 1], ARGV[number + 2]
  if is_new(name, tokens) then add(name, tokens, checksum) end
  redis.call('ZADD', used, batch, name)
end
evict()
"""
)
